// The sizes that the algorithm fixes, in one place. Row-purity tests include the largest of each.
#pragma once

namespace kdt {

inline constexpr int kMaxNodes = 64;                 // draft nodes of one tree, the root not counted
inline constexpr int kMaxTreeRows = kMaxNodes + 1;   // rows of one verify: nodes + root
inline constexpr int kMaxDepth = kMaxNodes;          // a chain of kMaxNodes nodes is a legal tree
inline constexpr int kMaxAncestors = kMaxDepth + 1;  // root .. the row itself
inline constexpr int kMaxTableDepth = 32;            // positions of a draft table (block_size - 1)
inline constexpr int kMaxTableWidth = 64;  // ranks of a draft table: exact for budgets up to kMaxNodes
inline constexpr int kMaxBlockRows = kMaxTableDepth + 1;  // rows of a block drafter: the root and its masks
inline constexpr int kMaxStops = 64;                      // stop tokens of one request
inline constexpr int kPageSize = 64;                      // KV positions per page: the grain of storage
inline constexpr int kChunkSize = 64;  // keys per softmax step: the grain of attention arithmetic
inline constexpr int kGroupSize = 32;  // INT4 weights per scale, along the input dimension

}  // namespace kdt
