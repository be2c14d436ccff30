// How a warp streams two row tiles of weights (32 outputs, or 16 outputs of gate and up): straight from
// global memory into registers, in the layout that load-time repacking made (layout.h), and how a step of
// them meets activations. One struct a kind of weights:
//
//   kColumns    columns of a step
//   kStepBytes  of one row tile
//   kDepth      steps in flight: with few tokens enough for a warp alone to hide a read's latency where there
//   are
//               few warps, half as many where there are more; with many tokens what the accumulators leave
//   Step        the registers of one step
//   Lane        where a lane reads its next step
//
// Order of operations of one output, for every row count: accumulator = 0; for every 32 columns ascending:
// f32 and bf16 weights: two mma steps into the accumulator; w4a16: two mma steps into zero, then accumulator
// = fma(scale, partial, accumulator).
#pragma once

#include "backend/cuda/device.h"
#include "backend/cuda/layout.h"

namespace kdt::cuda {

// Where a lane reads: pointers that move with the stream, so that a load is one instruction.
struct Lane {
    const unsigned char* at[2];  // [tile]

    __device__ __forceinline__ void advance(int bytes) {
        at[0] += bytes;
        at[1] += bytes;
    }
};

template <int Depth>
struct Bf16Stream {
    static constexpr int kColumns = 32, kStepBytes = 1024, kDepth = Depth;
    struct Step {
        uint4 half[2][2];  // [tile][rows g, g + 8]
    };

    using Lane = cuda::Lane;
    static __device__ __forceinline__ Lane lane_at(const unsigned char* const (&from)[2], int lane) {
        return {{from[0] + lane * 16, from[1] + lane * 16}};
    }

    // The step `step` steps behind where the lane is, if it is wanted.
    static __device__ __forceinline__ void load(Step& s, const Lane& l, int step, bool wanted) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                s.half[tile][half] = ptx::load_streaming(l.at[tile] + step * kStepBytes + half * 512, wanted);
    }

    // b(k, n): the B fragment of columns 32 k .. 32 k + 31 of the step and token tile n. `Group` token tiles
    // at a time: an mma step waits for the one before it on the same sums, so others stand between the two.
    template <int NT, int Group, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
#pragma unroll
        for (int n0 = 0; n0 < NT; n0 += Group) {
            uint4 x[Group];
#pragma unroll
            for (int n = 0; n < Group; ++n) x[n] = b(0, n0 + n);
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    ptx::mma_bf16(acc[tile][n0 + n], s.half[tile][0].x, s.half[tile][1].x, s.half[tile][0].y,
                                  s.half[tile][1].y, x[n].x, x[n].y);
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    ptx::mma_bf16(acc[tile][n0 + n], s.half[tile][0].z, s.half[tile][1].z, s.half[tile][0].w,
                                  s.half[tile][1].w, x[n].z, x[n].w);
        }
    }
};

template <int Depth>
struct F32Stream {
    static constexpr int kColumns = 32, kStepBytes = 2048, kDepth = Depth;
    struct Step {
        uint4 part[2][4];  // [tile][rows g, g + 8][columns 0..3, 4..7 of the lane's eight]
    };

    using Lane = cuda::Lane;
    static __device__ __forceinline__ Lane lane_at(const unsigned char* const (&from)[2], int lane) {
        return {{from[0] + lane * 16, from[1] + lane * 16}};
    }

    static __device__ __forceinline__ void load(Step& s, const Lane& l, int step, bool wanted) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                s.part[tile][part] = ptx::load_streaming(l.at[tile] + step * kStepBytes + part * 512, wanted);
    }

    static __device__ __forceinline__ uint4 rounded(const uint4& a, const uint4& b) {
        return make_uint4(ptx::pack_bf16(__uint_as_float(a.x), __uint_as_float(a.y)),
                          ptx::pack_bf16(__uint_as_float(a.z), __uint_as_float(a.w)),
                          ptx::pack_bf16(__uint_as_float(b.x), __uint_as_float(b.y)),
                          ptx::pack_bf16(__uint_as_float(b.z), __uint_as_float(b.w)));
    }

    template <int NT, int Group, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
        typename Bf16Stream<Depth>::Step narrow;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                narrow.half[tile][half] = rounded(s.part[tile][2 * half], s.part[tile][2 * half + 1]);
        Bf16Stream<Depth>::template multiply<NT, Group>(acc, narrow, b);
    }
};

template <bool F32Scales, int Depth>
struct W4Stream {
    static constexpr int kScaleBytes = F32Scales ? 16 : 8;  // of rows g and g + 8 of both steps of 32
    static constexpr int kColumns = 64, kStepBytes = kInt4BlockBytes + 8 * kScaleBytes;
    static constexpr int kDepth = Depth;
    struct Step {
        uint4 words[2];  // [tile]: x, y: rows g, g + 8 of the first 32 columns; z, w: of the others
        uint4 scale[2];  // F32Scales: a float each in the same order; otherwise two bf16 a word in x, y
    };

    struct Lane {
        const unsigned char *words[2], *scales[2];  // [tile]

        __device__ __forceinline__ void advance(int bytes) {
            words[0] += bytes, words[1] += bytes, scales[0] += bytes, scales[1] += bytes;
        }
    };
    static __device__ __forceinline__ Lane lane_at(const unsigned char* const (&from)[2], int lane) {
        const int scale = kInt4BlockBytes + lane / 4 * kScaleBytes;
        return {{from[0] + lane * 16, from[1] + lane * 16}, {from[0] + scale, from[1] + scale}};
    }

    static __device__ __forceinline__ void load(Step& s, const Lane& l, int step, bool wanted) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            s.words[tile] = ptx::load_streaming(l.words[tile] + step * kStepBytes, wanted);
            if constexpr (F32Scales) {
                s.scale[tile] = ptx::load_streaming(l.scales[tile] + step * kStepBytes, wanted);
            } else {
                const uint2 two = ptx::load_streaming_8(l.scales[tile] + step * kStepBytes, wanted);
                s.scale[tile].x = two.x;
                s.scale[tile].y = two.y;
            }
        }
    }

    // 128 + q in bf16 is the bit pattern 0x4300 | q; subtracting 136 is exact.
    static __device__ __forceinline__ uint32_t dequantise(uint32_t word, int pair) {
        return ptx::subtract_bf16x2(ptx::nibbles_as_bf16x2(word >> (4 * pair)), 0x43084308u);
    }

    // Of rows g and g + 8 in the 32 columns `half`.
    static __device__ __forceinline__ float2 scales(const uint4& s, int half) {
        if constexpr (F32Scales)
            return half == 0 ? make_float2(__uint_as_float(s.x), __uint_as_float(s.y))
                             : make_float2(__uint_as_float(s.z), __uint_as_float(s.w));
        else
            return widen_bf16x2(half == 0 ? s.x : s.y);
    }

    // As for bf16; the scales' fma's of a group run behind the first mma steps of the next.
    template <int NT, int Group, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
        constexpr int kGroups = NT / Group;
        static_assert(NT % Group == 0);
        float partial[2][Group][2][4];
        uint32_t f[2][8];
        const auto add = [&](int unit) {
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const float2 scale = scales(s.scale[tile], unit / kGroups);
                    float (&sum)[4] = acc[tile][unit % kGroups * Group + n];
                    const float (&p)[4] = partial[unit % 2][n][tile];
                    sum[0] = fmaf(scale.x, p[0], sum[0]);
                    sum[1] = fmaf(scale.x, p[1], sum[1]);
                    sum[2] = fmaf(scale.y, p[2], sum[2]);
                    sum[3] = fmaf(scale.y, p[3], sum[3]);
                }
        };
#pragma unroll
        for (int unit = 0; unit < 2 * kGroups; ++unit) {
            const int half = unit / kGroups, n0 = unit % kGroups * Group;
            if (n0 == 0) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const uint32_t top = half == 0 ? s.words[tile].x : s.words[tile].z;
                    const uint32_t low = half == 0 ? s.words[tile].y : s.words[tile].w;
#pragma unroll
                    for (int pair = 0; pair < 4; ++pair) {
                        f[tile][2 * pair] = dequantise(top, pair);
                        f[tile][2 * pair + 1] = dequantise(low, pair);
                    }
                }
            }
            uint4 x[Group];
#pragma unroll
            for (int n = 0; n < Group; ++n) x[n] = b(half, n0 + n);
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    ptx::mma_bf16_zero(partial[unit % 2][n][tile], f[tile][0], f[tile][1], f[tile][2],
                                       f[tile][3], x[n].x, x[n].y);
            if (unit > 0) add(unit - 1);
#pragma unroll
            for (int n = 0; n < Group; ++n)
#pragma unroll
                for (int tile = 0; tile < 2; ++tile)
                    ptx::mma_bf16(partial[unit % 2][n][tile], f[tile][4], f[tile][5], f[tile][6], f[tile][7],
                                  x[n].z, x[n].w);
        }
        add(2 * kGroups - 1);
    }
};

}  // namespace kdt::cuda
