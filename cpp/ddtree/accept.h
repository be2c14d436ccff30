// The walk through a verified tree (arXiv 2604.12989, section 4): at each node take the target's token; while
// a child holds it, step there. Emits the path and one bonus token. Lossless for greedy and sampled targets
// alike, since each emitted token is the target's own choice after its true prefix.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace kdt {

struct Accepted {
    std::vector<int32_t> path;  // rows, the root first; at least one
    std::vector<int32_t>
        emitted;  // tokens: those of path[1..], then the target's token after the last row. -1: no token
                  // could be chosen there (NaN logits); it is always the last one
};

// `rows` nodes were verified (the root included); nodes past them are ignored. `selected[i]` is the target's
// token after node i.
Accepted accept(std::span<const int32_t> token, std::span<const int32_t> parent,
                std::span<const int32_t> selected, int rows);

}  // namespace kdt
