// How work is cut, as plain functions of shapes: what fixes bits (K-splits, attention splits and groups)
// depends on weight shapes and absolute positions alone; what may follow the row count (tiles, warps) fixes
// no bit. Host and device arithmetic without a GPU in it: tests/cuda checks it on any machine.
#pragma once

#include <algorithm>
#include <array>

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

// Row tiles (of 16) that a launch covers: of one head's rows, a straddled tile counted for both heads.
KDT_HOST_DEVICE int tiles_of_head(int out, int heads) {
    return heads == 1 ? row_tiles(out) : out % kTileRows == 0 ? out / kTileRows : row_tiles(out) + 1;
}

// K-splits of a product: of all heads, or of as many experts as usual, and of gate and up together.
inline int product_splits(int out, int heads, bool gated, bool experts, int in) {
    return k_splits(tiles_of_head(out, heads) * (experts ? kUsualExperts : heads) * (gated ? 2 : 1), in);
}

// Pairs of tokens and experts up to which each block finds those of its expert by itself.
inline constexpr int kChosenPairs = 128;

// Grid and block of a product.
struct GemmCut {
    int splits, blocks, groups;  // grid x, y, z
    int pairs;                   // of row tiles, of a block
    int busiest;                 // pairs of the SM that gets the most
};

// What of a GPU a cut depends on.
struct Machine {
    int sms;
    std::array<int, 4> clusters;  // of 1, 2, 4 and 8 blocks that run at a time if an SM holds one block
};

// Blocks of `most` to two pairs of row tiles, whichever leave the busiest SM the least to do; a block costs
// two pairs more than it has, for it reads all activations of its columns. `room`: pairs that an SM holds at
// a time. With `large_blocks` the largest that give nearly every SM one. `tokens` is what a block holds at a
// time. Experts: as many groups as may have tokens.
inline GemmCut cut_gemm(int out, int heads, bool gated, int rows, int tokens, int experts, int splits,
                        const Machine& machine, int most, int room, bool large_blocks) {
    constexpr int kBlockCost = 2;
    const int tiles = tiles_of_head(out, heads), pairs = gated ? tiles : (tiles + 1) / 2;
    GemmCut best{splits, 0, experts > 0 ? experts : heads * ((rows + tokens - 1) / tokens), 0, 0};
    const int parts = experts > 0 ? std::min(experts, kUsualExperts) : best.groups;
    const int at_once = machine.clusters[splits == 1 ? 0 : splits == 2 ? 1 : splits == 4 ? 2 : 3];
    int least_cost = 0;
    for (int size = most; size >= 2; --size) {
        const int blocks = (pairs + size - 1) / size, clusters = blocks * parts;
        const int on_sm = std::max(room / size, 1), wave = at_once * on_sm;
        const int busiest = clusters / wave * on_sm +  // blocks of one SM: in whole waves, in the last
                            (clusters % wave * splits + machine.sms - 1) / machine.sms;
        const int cost = busiest * (size + kBlockCost);
        if (best.pairs > 0 && cost >= least_cost) continue;
        least_cost = cost;
        best.blocks = blocks;
        best.pairs = size;
        best.busiest = busiest * size;
        if (large_blocks && clusters * splits * 10 >= machine.sms * 9) break;
    }
    return best;
}

// gemm_few: activations of one block. Rows of a piece lie 64 bytes apart modulo 128.
inline constexpr int kFewRound = 512;  // columns of a turn of the longest ring of weights
inline constexpr int kFewActivationBytes = 48 * 1024, kFewActivationBytesAlone = 76 * 1024;

KDT_HOST_DEVICE constexpr int few_row_bytes(int columns) {
    return columns * 2 + 64;
}

// `alone`: no second block shares the SM.
inline int few_activation_bytes(int columns, int tokens, bool alone) {
    const int whole = (columns + kFewRound - 1) / kFewRound * kFewRound;
    return std::min(alone ? kFewActivationBytesAlone : kFewActivationBytes, tokens * few_row_bytes(whole));
}

// Columns that fit at a time: whole turns of the ring.
KDT_HOST_DEVICE int few_chunk_columns(int bytes, int tokens) {
    const int columns = (bytes / tokens - 64) / 2 / kFewRound * kFewRound;
    return columns < kFewRound ? kFewRound : columns;
}

// gemm_many: `groups` warps share a pair of row tiles and take `tiles` token tiles each. An instantiation
// each.
struct ManyShape {
    int tiles, groups;
    KDT_HOST_DEVICE constexpr int all() const { return tiles * groups; }  // token tiles of a block
};

inline ManyShape many_shape(int rows) {
    if (rows <= 16) return {2, 1};
    if (rows <= 24) return {3, 1};
    if (rows <= 32) return {4, 1};
    if (rows <= 40) return {5, 1};
    if (rows <= 64) return {4, 2};
    if (rows <= 80) return {5, 2};
    return {4, 4};
}

// Pairs of row tiles of a block, at most: what registers and shared memory hold of `step_bytes` a row tile.
KDT_HOST_DEVICE constexpr int many_pairs(int groups, int step_bytes) {
    return groups > 2 ? 3 : step_bytes > 1024 ? 4 : 9;
}

// Bytes of one step in shared memory: activations of `tiles` token tiles, then weights.
KDT_HOST_DEVICE constexpr int many_step_bytes(int tiles, int pairs, int columns, int step_bytes) {
    return tiles * columns * 16 + pairs * 2 * step_bytes;
}

// Steps in shared memory: as many as fit.
KDT_HOST_DEVICE constexpr int many_slots(int tiles, int pairs, int columns, int step_bytes) {
    const int fit = 100 * 1000 / many_step_bytes(tiles, pairs, columns, step_bytes);
    return fit < 6 ? fit : 6;
}

// Rows up to which a dense product goes to gemm_few. INT4 weights of 9 to 16 rows are better off with
// gemm_many, if its blocks fill an SM each: clusters of smaller ones come to lie two on one SM and none on
// another.
inline constexpr int kFewRows = 8, kMostFewRows = 16;

inline int few_rows(WeightKind kind, int out, int heads, bool gated, int in, const Machine& machine) {
    if (kind != WeightKind::w4a16) return kMostFewRows;
    const int splits = product_splits(out, heads, gated, false, in), most = many_pairs(1, kInt4BlockBytes);
    const GemmCut cut =
        cut_gemm(out, heads, gated, kMostFewRows, kMostFewRows, 0, splits, machine, most, most, false);
    return splits == 1 || cut.pairs == most ? kFewRows : kMostFewRows;
}

// Bytes of the rounded activations of a product: pieces [group of tokens][head][64 columns].
inline size_t rounded_bytes(int rows, int heads, int in) {
    const int tiles = many_shape(rows).all(), groups = (rows + tiles * 8 - 1) / (tiles * 8);
    return static_cast<size_t>(groups) * static_cast<size_t>(heads) * static_cast<size_t>(column_blocks(in)) *
           static_cast<size_t>(tiles * 8 * kBlockColumns * 2);
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
