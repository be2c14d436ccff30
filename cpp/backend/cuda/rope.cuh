// Rotary position embedding of one pair, as docs/numerics.md fixes it.
#pragma once

#include "backend/cuda/device.h"

namespace kdt::cuda {

// Pair j of a rotated vector: which two elements it is.
__device__ __forceinline__ int2 rope_pair(int j, int rope, bool interleaved) {
    return interleaved ? make_int2(2 * j, 2 * j + 1) : make_int2(j, j + rope / 2);
}

__device__ __forceinline__ float2 rotate(float x0, float x1, float c, float s) {
    return make_float2(fmaf(x0, c, -(x1 * s)), fmaf(x1, c, x0 * s));
}

}  // namespace kdt::cuda
