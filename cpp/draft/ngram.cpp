#include "draft/ngram.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/limits.h"

namespace kdt {

namespace {

// Positions right after earlier occurrences of the last `n` tokens, most recent first, at most `most`.
std::vector<size_t> matches(std::span<const int32_t> tokens, int n, int most) {
    std::vector<size_t> ends;
    const size_t size = tokens.size();
    const int32_t* suffix = tokens.data() + size - n;
    for (size_t end = size - 1; end >= static_cast<size_t>(n) && ends.size() < static_cast<size_t>(most);
         --end)
        if (std::equal(suffix, suffix + n, tokens.data() + end - n)) ends.push_back(end);
    return ends;
}

}  // namespace

NgramDrafter::NgramDrafter(const NgramOptions& options) : options_(options) {
    if (options.min_ngram < 1 || options.max_ngram < options.min_ngram)
        fail(ErrorCode::invalid_argument, "n-gram lengths are %d to %d; expected 1 <= min <= max",
             options.min_ngram, options.max_ngram);
    if (options.max_paths < 1 || options.max_paths > kMaxTableWidth)
        fail(ErrorCode::invalid_argument, "max_paths is %d; expected 1 to %d", options.max_paths,
             kMaxTableWidth);
    if (options.max_length < 1 || options.max_length > kMaxDepth)
        fail(ErrorCode::invalid_argument, "max_length is %d; expected 1 to %d", options.max_length,
             kMaxDepth);
}

void NgramDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    const std::span<const int32_t> tokens = request.tokens;
    proposal.clear();
    const int limit = std::min(request.max_depth, options_.max_length);
    for (int n = options_.max_ngram; n >= options_.min_ngram; --n) {
        if (tokens.size() <= static_cast<size_t>(n)) continue;
        const std::vector<size_t> ends = matches(tokens, n, options_.max_paths);
        if (ends.empty()) continue;
        for (const size_t end : ends) {
            Proposal::Path path;
            std::vector<size_t> agreeing = ends;
            for (int j = 0; j < limit && end + j < tokens.size(); ++j) {
                const int32_t token = tokens[end + j];
                std::vector<size_t> still;
                for (const size_t other : agreeing)
                    if (other + j < tokens.size() && tokens[other + j] == token) still.push_back(other);
                const double share = static_cast<double>(still.size()) / static_cast<double>(agreeing.size());
                const double trust = static_cast<double>(n + j) / (n + j + 1);
                path.token.push_back(token);
                path.logp.push_back(static_cast<float>(std::log(share * trust)));
                agreeing = std::move(still);
            }
            proposal.paths.push_back(std::move(path));
        }
        return;
    }
}

}  // namespace kdt
