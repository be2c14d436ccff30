// The walk through a verified tree (arXiv 2604.12989, section 4): at each node take the target's token; while
// a child holds it, step there. Emits the path and one bonus token. Lossless for greedy and sampled targets
// alike, since each emitted token is the target's own choice after its true prefix.
//
// The walk is cut exactly where plain decoding ends: behind the first stop token and after `limit` tokens.
// What lies behind the cut is neither emitted nor committed, and an error there does not count.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kdt {

struct Accepted {
    std::vector<int32_t> path;     // rows to commit, the root first
    std::vector<int32_t> emitted;  // the target's token after each of them: as many as rows
    bool failed = false;  // the walk came to a row after which no token could be chosen (selected -1)
};

// `rows` nodes were verified (the root included); nodes past them are ignored. `selected[i]` is the target's
// token after node i.
Accepted accept(std::span<const int32_t> token, std::span<const int32_t> parent,
                std::span<const int32_t> selected, int rows, int limit, std::span<const int32_t> stops);

}  // namespace kdt
