// What the warps of build_tree share (build_tree.cu): the proposal and the tree in shared memory, and how
// weights are compared.
//
// Weights are sums of non-positive numbers, kept as magnitudes: the bits of a non-negative float64 order as
// an integer, the heaviest candidate is the smallest, and "no candidate" is +infinity.
#pragma once

#include "backend/cuda/device.h"
#include "backend/cuda/tree.h"

namespace kdt::cuda::tree_build {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kNobody = 0x7FF00000u;  // high half of +infinity
// A row of the table in shared memory: its usable ranks, then infinities. Cell d * kRow + r is rank r of row
// d, which proposes tokens at depth d + 1. Three rows more than the table has end every chain of first
// children and are looked ahead into.
constexpr int kRow = kMaxTableWidth + 4, kRows = kMaxTableDepth + 3;
static_assert(kMaxTableWidth == 64 && kMaxNodes == 64 && kMaxDraftPaths == 4 * 32);

struct Shared {
    // the table
    int32_t cell_token[kRows * kRow];
    double cell[kRows * kRow];  // magnitudes
    int32_t width[kRows];       // usable cells of a row

    // the tree; where there are no paths a node n > 0 has its record and its weight only
    uint32_t record[kMaxTreeRows];     // parent << 16 | cell
    double node_weight[kMaxTreeRows];  // magnitudes
    int32_t node_token[kMaxTreeRows], node_parent[kMaxTreeRows], node_depth[kMaxTreeRows];
    int32_t node_source[kMaxTreeRows];
    int32_t in_row[kMaxTreeRows];  // whether the node's token stands in the table's row of its depth
    int32_t count;                 // nodes without the root
    int32_t repeated;              // a row holds a token twice

    // the paths
    int32_t path_length[kMaxDraftPaths];  // usable steps
    // behind this struct, with paths: float [max_paths, kMaxDepth] magnitudes, int32 [max_paths, kMaxDepth]
    // tokens
};

__device__ __forceinline__ double as_double(uint32_t high, uint32_t low) {
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
}

__device__ __forceinline__ uint32_t high_half(double x) {
    return static_cast<uint32_t>(__double2hiint(x));
}

__device__ __forceinline__ uint32_t low_half(double x) {
    return static_cast<uint32_t>(__double2loint(x));
}

__device__ __forceinline__ double infinity() {
    return as_double(kNobody, 0);
}

// The value of lane `lane`.
__device__ __forceinline__ double shuffle(double x, int lane) {
    return as_double(__shfl_sync(kAll, high_half(x), lane), __shfl_sync(kAll, low_half(x), lane));
}

__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

}  // namespace kdt::cuda::tree_build
