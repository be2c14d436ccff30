// Ops of the draft model (docs/kernels/draft.md): taps that wait, keys and values in pages, attention of a
// block over committed positions and itself.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

inline constexpr int kMaxHeadDim = 1024;

// Where the accumulators of a block's attention restart: absolute positions, from the layer's window alone.
// A window keeps the number of splits small at any position, so they may stay short; without one they grow.
struct BlockSplits {
    static constexpr int kSplit = 256;       // keys of a split
    static constexpr int kLongSplit = 1024;  // behind kLongFrom, where no short window bounds them
    static constexpr int kLongFrom = 8192;   // a position
    static constexpr int kLongestShortWindow = 8192;

    bool uniform;

    // `window` 0: none.
    static BlockSplits of_window(int window) { return {window > 0 && window <= kLongestShortWindow}; }

    // Split s covers positions [start(s), start(s + 1)).
    KDT_HOST_DEVICE int start(int s) const {
        if (uniform || s <= kLongFrom / kSplit) return s * kSplit;
        return kLongFrom + (s - kLongFrom / kSplit) * kLongSplit;
    }
    // The split that holds position p.
    KDT_HOST_DEVICE int of(int p) const {
        if (uniform || p < kLongFrom) return p / kSplit;
        return kLongFrom / kSplit + (p - kLongFrom) / kLongSplit;
    }
};

// Splits that one row can meet, of `positions` at most.
inline int block_parts(int window, int positions) {
    const BlockSplits splits = BlockSplits::of_window(window);
    if (!splits.uniform) return splits.of(positions - 1) + 1;
    const int keys = std::min(positions, 2 * window - 1);  // window - 1 on each side
    return (keys + BlockSplits::kSplit - 2) / BlockSplits::kSplit + 1;
}

struct BlockAttentionArgs {
    RowSpan rows;
    const int32_t* position;  // [rows] absolute
    const int32_t* start;     // scalar: committed positions
    const int32_t* sequence;  // scalar: row of the page table
    const float* q;           // [rows, heads, head_dim]
    DraftCache cache;
    int heads, kv_heads, head_dim;
    int block, window;  // entries behind *start; keys at distance < window are seen (0: all)
    bool causal;
    BlockSplits splits;
    float scale_log2;  // softmax scale * log2(e)
    // Partial softmaxes of the slice's rows; slot i is the row's i-th split, from that of its first key on.
    int parts;
    float* part;    // [slice rows, heads, parts, head_dim] unnormalised outputs
    float2* state;  // [slice rows, heads, parts] maximum (of scaled scores, base 2) and sum
    float* out;     // [rows, heads, head_dim]
};

void launch_keep_taps(const GemmLaunch& l, const KeepTapsArgs& args);
void launch_norm_rotate(const GemmLaunch& l, const NormRotateArgs& args);
void launch_write_key_value(const GemmLaunch& l, const WriteKeyValueArgs& args, bool bf16_cache);

// Heads that the tensor-core attention takes.
inline bool block_attend_has_tensor_cores(int head_dim) {
    return head_dim % 8 == 0 && head_dim <= 128;
}
void launch_block_attend_bf16(const GemmLaunch& l, const BlockAttentionArgs& args);
// Any head, in float32 over a cache of either type.
void launch_block_attend_fma(const GemmLaunch& l, const BlockAttentionArgs& args, bool bf16_cache);
void launch_block_merge(const GemmLaunch& l, const BlockAttentionArgs& args);

}  // namespace kdt::cuda
