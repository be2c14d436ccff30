// What every kernel needs: the number of live rows, reductions of a fixed shape, conversions, silu.
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "backend/backend.h"
#include "backend/cuda/ptx.h"

namespace kdt::cuda {

inline constexpr float kLog2E = 1.44269504088896340736f;

// Rows of one launch. `first` is where this launch starts in arrays of all rows: long prompts run in slices.
struct RowSpan {
    const int32_t* live;  // of the whole batch
    int first;
    int count;  // rows of this slice at most

    __device__ __forceinline__ int live_count() const {
        const int rest = (live == nullptr ? first + count : __ldcg(live)) - first;
        return rest < 0 ? 0 : rest < count ? rest : count;
    }
};

__device__ __forceinline__ int live_rows(const Rows& rows) {
    if (rows.live == nullptr) return rows.capacity;
    const int live = __ldcg(rows.live);
    return live < 0 ? 0 : live < rows.capacity ? live : rows.capacity;
}

__device__ __forceinline__ float widen_bf16(uint32_t low_half) {
    return __uint_as_float(low_half << 16);
}

__device__ __forceinline__ float2 widen_bf16x2(uint32_t pair) {
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
}

__device__ __forceinline__ float exp_fast(float x) {
    return ptx::exp2_approx(x * kLog2E);
}

__device__ __forceinline__ float silu(float g) {
    return g / (1.0f + exp_fast(-g));
}

// Sum over the lanes of a warp as the tree (l, l ^ 16), (l, l ^ 8), ... : every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int offset = 16; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
    return x;
}

// Sum over a block: warp trees, then warps in order. `scratch` holds blockDim.x / 32 floats; every thread
// gets the sum. Ends with no barrier: a caller that reuses `scratch` puts one.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    float total = scratch[0];
    for (int w = 1; w < static_cast<int>(blockDim.x) / 32; ++w) total += scratch[w];
    return total;
}

// Four activations written by an earlier kernel: read through L2, never from a stale L1 line.
__device__ __forceinline__ float4 load_activation4(const float* p) {
    return __ldcg(reinterpret_cast<const float4*>(p));
}

__device__ __forceinline__ float load_activation(const float* p) {
    return __ldcg(p);
}

}  // namespace kdt::cuda
