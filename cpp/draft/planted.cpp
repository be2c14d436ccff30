#include "draft/planted.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "core/limits.h"

namespace kdt {

namespace {

// SplitMix64 (Steele, Lea, Flood 2014): a stream that depends on seed and position alone.
class Stream {
  public:
    Stream(uint64_t seed, uint64_t position)
        : state_(seed * 0x9E3779B97F4A7C15ull ^ (position + 1) * 0xD1B54A32D192ED03ull) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }
    int below(int n) { return static_cast<int>(next() % static_cast<uint64_t>(n)); }
    float uniform() { return static_cast<float>(next() >> 40) * 0x1p-24f; }

  private:
    uint64_t state_;
};

// One path along `right`, and one that leaves it at each depth, by the likeliest other token.
Proposal paths_of(const Proposal& table, const std::vector<int32_t>& right) {
    Proposal result;
    for (int leaves = -1; leaves < table.depth; ++leaves) {
        Proposal::Path path;
        for (int d = 0; d < table.depth && (leaves < 0 || d <= leaves); ++d) {
            const int32_t* row = table.table_token.data() + d * table.width;
            const int32_t other = row[0] != right[d] ? row[0] : row[std::min(1, table.width - 1)];
            const int32_t token = d == leaves ? other : right[d];
            const auto at = std::find(row, row + table.width, token);
            const auto rank = at == row + table.width ? table.width - 1 : at - row;
            path.token.push_back(token);
            path.logp.push_back(table.table_logp[d * table.width + rank]);
        }
        result.paths.push_back(std::move(path));
    }
    return result;
}

}  // namespace

PlantedDrafter::PlantedDrafter(std::vector<int32_t> truth, int vocab, const PlantedOptions& options)
    : truth_(std::move(truth)), vocab_(vocab), options_(options) {
    if (options.depth < 1 || options.depth > kMaxTableDepth || options.width < 1 ||
        options.width > kMaxTableWidth || options.width > vocab)
        fail(ErrorCode::invalid_argument,
             "a planted table is [%d, %d]; expected at most [%d, %d] and no more ranks than the %d tokens",
             options.depth, options.width, kMaxTableDepth, kMaxTableWidth, vocab);
    if (!(options.break_probability >= 0.0f && options.break_probability <= 1.0f))
        fail(ErrorCode::invalid_argument, "break_probability is %g; expected 0 to 1",
             static_cast<double>(options.break_probability));
}

void PlantedDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    const std::span<const int32_t> tokens = request.tokens;
    proposal.clear();
    const size_t root = tokens.size() - 1;
    Stream random(options_.seed, root);
    const int depth = options_.depth, width = options_.width;
    proposal.depth = depth;
    proposal.width = width;
    bool broken = false;
    std::vector<float> probability(width);
    std::vector<int32_t> right;  // per depth: the truth while the draft is not broken
    for (int d = 0; d < depth; ++d) {
        const size_t position = root + 1 + d;
        const int32_t truth = position < truth_.size() ? truth_[position] : -1;
        if (random.uniform() < options_.break_probability) broken = true;

        std::vector<int32_t> row;
        while (static_cast<int>(row.size()) < width) {
            const int32_t token = random.below(vocab_);
            const bool wrong = token != truth || vocab_ <= width;
            if (wrong && std::find(row.begin(), row.end(), token) == row.end()) row.push_back(token);
        }
        // Most rows are sure and right, so that paths get long within a small budget; some are torn between
        // two tokens and the second is right; some know nothing and the truth stands anywhere.
        const int kind = random.below(8);
        const int rank = kind < 5 || width == 1 ? 0 : kind < 7 ? 1 : 1 + random.below(width - 1);
        if (truth >= 0 && !broken && std::find(row.begin(), row.end(), truth) == row.end()) row[rank] = truth;
        proposal.table_token.insert(proposal.table_token.end(), row.begin(), row.end());

        for (int r = 0; r < width; ++r) {
            const bool likely = kind == 7 || r == 0 || (kind >= 5 && r == 1);
            probability[r] = (likely ? 1.0f : 0.01f) * (0.9f + 0.1f * random.uniform());
        }
        std::sort(probability.begin(), probability.end(), std::greater<>());
        float total = 0.02f;  // of tokens outside the table
        for (const float p : probability) total += p;
        for (const float p : probability) proposal.table_logp.push_back(std::log(p / total));
        right.push_back(truth >= 0 && !broken ? truth : row[0]);
    }
    if (options_.as_paths) proposal = paths_of(proposal, right);
}

}  // namespace kdt
