// Attention over latents (docs/kernels/attention.md): splits of a row's virtual key sequence, and their
// merge.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

inline constexpr int kStateSets = 2;

struct AttentionArgs {
    RowSpan rows;
    RowBatch batch;
    LatentCache cache;
    const float* q;  // [rows, heads, latent + rope]
    int heads, latent, rope;
    float scale_log2;  // softmax scale * log2(e)
    float* part;       // [slice rows, heads, parts, latent] unnormalised outputs
    float2* state;     // [slice rows, heads, parts, kStateSets] maximum (of scaled scores, base 2) and sum of
                       // the split's even and odd steps; the outputs refer to the larger maximum
    int parts;         // splits of the longest row
    int blocks;        // (or clusters) that share a row's splits; the launches below set it
    float* out;        // [rows, heads, latent]
};

void launch_attend_bf16(const GemmLaunch& l, const AttentionArgs& args);
void launch_attend_f32(const GemmLaunch& l, AttentionArgs args);
void launch_attend_merge(const GemmLaunch& l, const AttentionArgs& args);

}  // namespace kdt::cuda
