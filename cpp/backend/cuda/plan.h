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

// Experts that a one-row product reads, for the rule above: no K-split can depend on what was routed.
inline constexpr int kUsualExperts = 8;

// Rows up to which a block takes activations as they come and rounds them itself.
inline constexpr int kFewRows = 16;

// Row tiles (of 16) that a launch covers: of one head's rows, a straddled tile counted for both heads.
KDT_HOST_DEVICE int tiles_of_head(int out, int heads) {
    return heads == 1 ? row_tiles(out) : out % kTileRows == 0 ? out / kTileRows : row_tiles(out) + 1;
}

// Grid and block of a product.
struct GemmCut {
    int splits, blocks, groups;  // grid x, y, z
    int warps;                   // of a block, a power of two
    int busiest;                 // warps of the SM that gets the most
};

// Each warp has a pair of row tiles; blocks of 8, 4 or 2 warps, whichever leaves the busiest SM the fewest.
// With `large_blocks` the largest that give nearly every SM one: every block reads all activations of its
// columns. `tokens` is what a block holds at a time. Experts: as many groups as may have tokens.
inline GemmCut cut_gemm(int out, int heads, bool gated, int rows, int tokens, int experts, int splits,
                        int sms, int most_warps, bool large_blocks) {
    const int tiles = tiles_of_head(out, heads), pairs = gated ? tiles : (tiles + 1) / 2;
    GemmCut best{splits, 0, experts > 0 ? experts : heads * ((rows + tokens - 1) / tokens), 0, 0};
    const int parts = splits * (experts > 0 ? std::min(experts, kUsualExperts) : best.groups);
    for (int warps = most_warps; warps >= 2; warps /= 2) {
        const int blocks = (pairs + warps - 1) / warps;
        const int busiest = (blocks * parts + sms - 1) / sms * warps;
        if (best.warps > 0 && busiest >= best.busiest) continue;
        best.blocks = blocks;
        best.warps = warps;
        best.busiest = busiest;
        if (large_blocks && blocks * parts * 10 >= sms * 9) break;
    }
    return best;
}

// gemm_few: activations of one block. Rows of a piece lie 64 bytes apart modulo 128.
inline constexpr int kFewRound = 512;  // columns of a turn of the longest ring of weights
inline constexpr int kFewActivationBytes = 48 * 1024;

KDT_HOST_DEVICE constexpr int few_row_bytes(int columns) {
    return columns * 2 + 64;
}

inline int few_activation_bytes(int columns, int tokens) {
    const int whole = (columns + kFewRound - 1) / kFewRound * kFewRound;
    return std::min(kFewActivationBytes, tokens * few_row_bytes(whole));
}

// Columns that fit at a time: whole turns of the ring.
KDT_HOST_DEVICE int few_chunk_columns(int bytes, int tokens) {
    const int columns = (bytes / tokens - 64) / 2 / kFewRound * kFewRound;
    return columns < kFewRound ? kFewRound : columns;
}

// gemm_many: pieces of 64 columns of all tokens, in a ring; two blocks fit an SM of sm_120.
inline constexpr int kManySlots = 4, kManyWarps = 4;

KDT_HOST_DEVICE constexpr int many_piece_bytes(int token_tiles) {
    return token_tiles * 8 * kBlockColumns * 2;
}

// Token tiles of a block: an instantiation each.
inline int many_token_tiles(int rows) {
    return rows <= 24 ? 3 : rows <= 40 ? 5 : rows <= 56 ? 7 : 9;
}

// Bytes of the rounded activations of a product: pieces [group of tokens][head][64 columns].
inline size_t rounded_bytes(int rows, int heads, int in) {
    const int tiles = many_token_tiles(rows), groups = (rows + tiles * 8 - 1) / (tiles * 8);
    return static_cast<size_t>(groups) * static_cast<size_t>(heads) * static_cast<size_t>(column_blocks(in)) *
           static_cast<size_t>(many_piece_bytes(tiles));
}

// ----------------------------------------------------------------------------------------------------------------
// attention

// Split s covers virtual positions [split_start(s), split_start(s + 1)): whole chunks, more of them with
// distance. Changing any of these numbers changes bits.
KDT_HOST_DEVICE int split_start(int s) {
    if (s <= 8) return s * 128;                   // to 1,024
    if (s <= 20) return 1024 + (s - 8) * 256;     // to 4,096
    if (s <= 44) return 4096 + (s - 20) * 512;    // to 16,384
    if (s <= 92) return 16384 + (s - 44) * 1024;  // to 65,536
    return 65536 + (s - 92) * 2048;
}

// The split that holds virtual position p; the number of splits of n keys is split_of(n - 1) + 1.
KDT_HOST_DEVICE int split_of(int p) {
    if (p < 1024) return p / 128;
    if (p < 4096) return 8 + (p - 1024) / 256;
    if (p < 16384) return 20 + (p - 4096) / 512;
    if (p < 65536) return 44 + (p - 16384) / 1024;
    return 92 + (p - 65536) / 2048;
}

// The first split of block b of the `blocks` that share a row's splits, as evenly as whole splits allow.
// Fixes no bit: a split's sums are its own.
KDT_HOST_DEVICE int share_border(int b, int blocks, int keys) {
    if (b >= blocks) return split_of(keys - 1) + 1;
    const int at = static_cast<int>(static_cast<int64_t>(keys) * b / blocks), s = split_of(at);
    return at - split_start(s) > split_start(s + 1) - at ? s + 1 : s;
}

// Rows of one attention launch: bounds the partial results that wait for their merge.
inline constexpr int kAttentionRows = 72;
// Rows of one pass of the experts: bounds their intermediate results.
inline constexpr int kExpertRows = 512;

// Partial results (of one row and head) that an attention over `keys` keys at most writes.
inline int attention_parts(int keys) {
    return keys <= 0 ? 1 : split_of(keys - 1) + 1;
}

// Blocks that share a row's splits, for `jobs` rows (times tiles of heads) on `slots` blocks at a time: what
// takes the least time at a usual length. Starting a block costs about as much as kStart keys.
inline int attention_blocks(int jobs, int parts, int slots) {
    constexpr int kUsual = 4096, kStart = 192;
    int best = 1;
    int64_t least = INT64_MAX;
    for (int blocks = 1; blocks <= std::min(parts, std::max(slots, 1)); ++blocks) {
        const int64_t waves = (static_cast<int64_t>(jobs) * blocks + slots - 1) / std::max(slots, 1);
        const int64_t time = waves * (kUsual / blocks + kStart);
        if (time >= least) continue;
        least = time;
        best = blocks;
    }
    return best;
}

}  // namespace kdt::cuda
