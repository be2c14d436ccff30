#include "draft/replay.h"

#include "core/error.h"
#include "core/limits.h"

namespace kdt {

ReplayDrafter::ReplayDrafter(std::span<const int32_t> positions, std::span<const int32_t> tokens,
                             std::span<const float> logp, int depth, int width)
    : depth_(depth), width_(width), tokens_(tokens.begin(), tokens.end()), logp_(logp.begin(), logp.end()) {
    if (depth < 1 || depth > kMaxTableDepth || width < 1 || width > kMaxTableWidth)
        fail(ErrorCode::invalid_argument,
             "a draft table is [%d, %d]; expected at most [%d, %d] and at least [1, 1]", depth, width,
             kMaxTableDepth, kMaxTableWidth);
    const size_t wanted = positions.size() * static_cast<size_t>(depth) * width;
    if (tokens.size() != wanted || logp.size() != wanted)
        fail(ErrorCode::invalid_argument,
             "draft tables hold %zu tokens and %zu log-probabilities; expected %zu of each", tokens.size(),
             logp.size(), wanted);
    for (size_t i = 0; i < positions.size(); ++i)
        if (!index_.emplace(positions[i], i).second)
            fail(ErrorCode::invalid_argument, "draft tables name root position %d twice", positions[i]);
}

void ReplayDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    const std::span<const int32_t> tokens = request.tokens;
    proposal.clear();
    const auto it = index_.find(static_cast<int32_t>(tokens.size()) - 1);
    if (it == index_.end()) return;
    const size_t entries = static_cast<size_t>(depth_) * width_;
    proposal.depth = depth_;
    proposal.width = width_;
    proposal.table_token.assign(tokens_.begin() + it->second * entries,
                                tokens_.begin() + (it->second + 1) * entries);
    proposal.table_logp.assign(logp_.begin() + it->second * entries,
                               logp_.begin() + (it->second + 1) * entries);
}

}  // namespace kdt
