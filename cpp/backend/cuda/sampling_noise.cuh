// What temperature, filters and noise make of a logit: a distance to the greatest one, a mass, a key in the
// race for the next token. Masses are exp(z) in units of 2^-40.
#pragma once

#include "backend/cuda/sampling.cuh"

namespace kdt::cuda::sampling {

constexpr float kMassUnit = 1099511627776.0f;  // 2^40

// Word 0 of Philox4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ uint32_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                           uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0,
                       p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        const uint32_t high0 = static_cast<uint32_t>(p0 >> 32), high1 = static_cast<uint32_t>(p1 >> 32);
        const uint32_t n0 = high1 ^ c1 ^ k0, n2 = high0 ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

__device__ __forceinline__ float gumbel(const SampleParams& s, uint32_t id, uint32_t position) {
    const uint32_t word =
        philox(id, position, s.choice, 0, static_cast<uint32_t>(s.seed), static_cast<uint32_t>(s.seed >> 32));
    const float v = fminf((static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f, 0.99999994f);
    const float e = v < 2.44140625e-4f ? fmaf(v * v, 0.5f, v) : -logf(1.0f - v);
    return -logf(e);
}

// What a token's noise can be: no token this far below the greatest has a chance against it, whose noise is
// above -2.82 while no noise is above 22.88.
constexpr float kHopeless = -26.0f;

// A row's logits on the scale of its request: z is the distance to the greatest one, after the temperature.
struct Scale {
    SampleParams s;
    float greatest;

    __device__ __forceinline__ float z(float x) const {
        return x == greatest ? 0.0f : (x - greatest) / s.temperature;
    }
    __device__ __forceinline__ uint64_t mass(float x) const { return __float2ull_rn(expf(z(x)) * kMassUnit); }
    // The mass that top_p's tokens reach, of `total`.
    __device__ __forceinline__ uint64_t target(uint64_t total) const {
        const double limit = ceil(static_cast<double>(s.top_p) * static_cast<double>(total));
        return limit < 1.0 ? 1 : static_cast<uint64_t>(limit);
    }
    // Its key once the noise is added; 0: not in the race.
    __device__ __forceinline__ uint64_t noisy_key(int id, float x, uint32_t position) const {
        const float at = z(x);
        if (at < kHopeless || (s.min_p > 0.0f && !(expf(at) >= s.min_p))) return 0;
        return token_key(at + gumbel(s, static_cast<uint32_t>(id), position), id);
    }
};

}  // namespace kdt::cuda::sampling
