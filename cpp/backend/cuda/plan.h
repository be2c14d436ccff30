// How work is cut, as plain functions of shapes: what fixes bits (K-splits, attention splits and groups)
// depends on weight shapes and absolute positions alone; what may follow the row count (tiles, warps) fixes
// no bit. Host and device arithmetic without a GPU in it: tests/cuda checks it on any machine.
#pragma once

#include <algorithm>

#include "backend/cuda/layout.h"
#include "core/limits.h"

namespace kdt::cuda {

// ----------------------------------------------------------------------------------------------------------------
// matrix products

// K-splits of a matrix product: places where an accumulator restarts. `tiles` counts 16-row tiles that a warp
// takes two at a time: of the matrix, of all heads, or of gate and up together. Splits exist to give a
// one-row product enough warps; they are powers of two, at most 8 (one cluster), and at least 256 columns
// long.
inline int k_splits(int tiles, int in) {
    constexpr int kEnoughWarps = 768, kShortestSplit = 256;
    int splits = 1;
    while (splits < 8 && tiles / 2 * splits < kEnoughWarps && in / (2 * splits) >= kShortestSplit)
        splits *= 2;
    return splits;
}

// Blocks of 64 columns in [first, last) of split s.
KDT_HOST_DEVICE int split_border(int blocks, int s, int splits) {
    return static_cast<int>(static_cast<int64_t>(blocks) * s / splits);
}

// Token tiles (of 8) that one block of threads holds: an instantiation each.
inline int token_tiles(int rows) {
    return rows <= 8 ? 1 : rows <= 16 ? 2 : rows <= 32 ? 4 : 9;
}

// The same for experts, which seldom have more than a few tokens each; more are taken in turn.
inline int expert_token_tiles(int rows) {
    return rows <= 8 ? 1 : 2;
}

// Warps of a block, each two row tiles wide: as many as still give every SM a block. More tokens need more
// threads to carry their activations.
inline int gemm_warps(int tiles, int parts, int token_tiles, WeightKind kind) {
    constexpr int kEnoughBlocks = 120;
    const int least = std::min(token_tiles, 8), most = kind == WeightKind::f32 ? std::max(least, 4) : 8;
    int warps = most;
    while (warps > least && (tiles / 2 + warps - 1) / warps * parts < kEnoughBlocks) warps /= 2;
    return warps;
}

// Columns of x that a block holds at a time, twice.
KDT_HOST_DEVICE constexpr int chunk_columns(int warps, int token_tiles) {
    const int columns = 64 * warps / token_tiles / 64 * 64;
    return columns < 64 ? 64 : columns;
}

// Depth of each warp's private pipeline of weights, in steps.
inline int gemm_stages(int warps, WeightKind kind) {
    const int at_eight = kind == WeightKind::w4a16 ? 8 : kind == WeightKind::bf16 ? 4 : 2;
    return std::min(16, at_eight * 8 / warps);
}

// ----------------------------------------------------------------------------------------------------------------
// attention

// Split s covers virtual positions [split_start(s), split_start(s + 1)); splits are whole chunks and grow
// with distance. Group g folds whole splits. Changing any of these numbers changes bits.
KDT_HOST_DEVICE int split_start(int s) {
    if (s <= 8) return s * 128;                 // to 1,024
    if (s <= 36) return 1024 + (s - 8) * 256;   // to 8,192
    if (s <= 84) return 8192 + (s - 36) * 512;  // to 32,768
    return 32768 + (s - 84) * 1024;
}

// The split that holds virtual position p; the number of splits of n keys is split_of(n - 1) + 1.
KDT_HOST_DEVICE int split_of(int p) {
    if (p < 1024) return p / 128;
    if (p < 8192) return 8 + (p - 1024) / 256;
    if (p < 32768) return 36 + (p - 8192) / 512;
    return 84 + (p - 32768) / 1024;
}

KDT_HOST_DEVICE int group_start(int g) {       // a position
    if (g <= 4) return g * 1024;               // to 4,096
    if (g <= 6) return 4096 + (g - 4) * 2048;  // to 8,192
    return 8192 + (g - 6) * 4096;
}

KDT_HOST_DEVICE int group_of(int p) {
    if (p < 4096) return p / 1024;
    if (p < 8192) return 4 + (p - 4096) / 2048;
    return 6 + (p - 8192) / 4096;
}

// Rows up to which every split gets a block of its own; with more, a block folds the splits of a group in
// turn.
inline constexpr int kRowsForSplitBlocks = 8;
// Rows of one attention launch: bounds the partial results that wait for their merge.
inline constexpr int kAttentionRows = 72;
// Rows of one pass of the experts: bounds their intermediate results.
inline constexpr int kExpertRows = 512;

// Partial results (of one row and head) that an attention over `keys` keys at most writes.
inline int attention_parts(int rows, int keys) {
    if (keys <= 0) return 1;
    return rows <= kRowsForSplitBlocks ? split_of(keys - 1) + 1 : group_of(keys - 1) + 1;
}

}  // namespace kdt::cuda
