// A draft tree on plain arrays. Node 0 is the root: the last emitted token, whose latent is not in the cache
// yet.
#pragma once

#include <cstdint>
#include <vector>

namespace kdt {

// Who proposed a node: bits of Tree::source.
inline constexpr int32_t kFromTable = 1;
inline constexpr int32_t kFromPath = 2;

struct Tree {
    int count = 0;  // nodes, the root not counted; arrays hold count + 1 entries, in pop order
    std::vector<int32_t> token;
    std::vector<int32_t> parent;  // parent < child; -1 for the root
    std::vector<int32_t> depth;   // 0 for the root
    std::vector<int32_t> source;  // kFromTable | kFromPath; 0 for the root
    std::vector<double> weight;   // log-probability of the path, float64 sum of float32 terms; 0 for the root
};

}  // namespace kdt
