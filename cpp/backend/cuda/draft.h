// Ops of the draft model (docs/kernels/draft.md): taps that wait, keys and values in pages, attention of a
// block over committed positions and itself.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/draft_plan.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

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

void launch_block_attend_bf16(const GemmLaunch& l, const BlockAttentionArgs& args);
// Any head, in float32 over a cache of either type.
void launch_block_attend_fma(const GemmLaunch& l, const BlockAttentionArgs& args, bool bf16_cache);
void launch_block_merge(const GemmLaunch& l, const BlockAttentionArgs& args);

}  // namespace kdt::cuda
