// What the attention kernels share: which keys a row and a block have, and how two partial softmaxes become
// one.
#pragma once

#include "backend/cuda/attention.h"
#include "backend/cuda/cache.cuh"

namespace kdt::cuda {

// Keys of one row.
struct KeySpan {
    int prefix, ancestors, count;
};

__device__ __forceinline__ KeySpan key_span(const RowBatch& batch, int row) {
    const int prefix = __ldcg(batch.prefix + row), ancestors = __ldcg(batch.ancestor_count + row);
    return {prefix, ancestors, prefix + ancestors};
}

// Splits [first, last) of block b of a row's blocks: none where there are more blocks than splits.
__device__ __forceinline__ int2 splits_of_block(int b, int blocks, int keys) {
    if (keys <= 0) return make_int2(0, 0);
    return make_int2(share_border(b, blocks, keys), share_border(b + 1, blocks, keys));
}

// Factors with which an older and a newer partial softmax enter their union, and the union's maximum.
struct Fold {
    float maximum, older, newer;
};

__device__ __forceinline__ Fold fold(float older_maximum, float newer_maximum) {
    const float m = fmaxf(older_maximum, newer_maximum);
    return {m, ptx::exp2_approx(older_maximum - m), ptx::exp2_approx(newer_maximum - m)};
}

__device__ __forceinline__ float folded(const Fold& f, float older, float newer) {
    return fmaf(older, f.older, newer * f.newer);
}

}  // namespace kdt::cuda
