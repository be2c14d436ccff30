// How a warp takes two row tiles of weights (32 outputs, or 16 outputs of gate and up) into registers, step
// by step in the layout that load-time repacking made (layout.h), and how a step of them meets activations.
// One struct a kind of weights:
//
//   kColumns    columns of a step
//   kStepBytes  of one row tile
//   kDepth      steps that gemm_few has in flight: enough for a warp alone to hide a read's latency where
//               there are few warps, half as many where there are more
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

// What a read of weights goes through: straight from global memory, if the step is wanted; or from a copy in
// shared memory, whose places are 32-bit addresses.
struct FromGlobal {
    bool wanted;
    __device__ __forceinline__ uint4 sixteen(const unsigned char* at) const {
        return ptx::load_streaming(at, wanted);
    }
    __device__ __forceinline__ uint2 eight(const unsigned char* at) const {
        return ptx::load_streaming_8(at, wanted);
    }
};
struct FromShared {
    __device__ __forceinline__ uint4 sixteen(uint32_t at) const { return ptx::load_shared_16(at); }
    __device__ __forceinline__ uint2 eight(uint32_t at) const { return ptx::load_shared_8(at); }
};

// Where a lane reads plain weights of two row tiles: places that move with the stream, so that a load is one
// instruction.
template <class Place>
struct PlainLane {
    Place at[2];

    __device__ __forceinline__ PlainLane(Place first, Place second, int lane)
        : at{first + lane * 16, second + lane * 16} {}
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

    template <class Place>
    using Lane = PlainLane<Place>;

    // The step `step` steps behind where the lane is.
    template <class Place, class From>
    static __device__ __forceinline__ void load(Step& s, const Lane<Place>& l, int step, const From& from) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                s.half[tile][half] = from.sixteen(l.at[tile] + step * kStepBytes + half * 512);
    }

    // b(k, n): the B fragment of columns 32 k .. 32 k + 31 of the step and token tile n. An mma step waits
    // for the one before it on the same sums, so those of all token tiles stand between the two.
    template <int NT, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
        uint4 x[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) x[n] = b(0, n);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                ptx::mma_bf16(acc[tile][n], s.half[tile][0].x, s.half[tile][1].x, s.half[tile][0].y,
                              s.half[tile][1].y, x[n].x, x[n].y);
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                ptx::mma_bf16(acc[tile][n], s.half[tile][0].z, s.half[tile][1].z, s.half[tile][0].w,
                              s.half[tile][1].w, x[n].z, x[n].w);
    }
};

template <int Depth>
struct F32Stream {
    static constexpr int kColumns = 32, kStepBytes = 2048, kDepth = Depth;
    struct Step {
        uint4 part[2][4];  // [tile][rows g, g + 8][columns 0..3, 4..7 of the lane's eight]
    };

    template <class Place>
    using Lane = PlainLane<Place>;

    template <class Place, class From>
    static __device__ __forceinline__ void load(Step& s, const Lane<Place>& l, int step, const From& from) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int part = 0; part < 4; ++part)
                s.part[tile][part] = from.sixteen(l.at[tile] + step * kStepBytes + part * 512);
    }

    static __device__ __forceinline__ uint4 rounded(const uint4& a, const uint4& b) {
        return make_uint4(ptx::pack_bf16(__uint_as_float(a.x), __uint_as_float(a.y)),
                          ptx::pack_bf16(__uint_as_float(a.z), __uint_as_float(a.w)),
                          ptx::pack_bf16(__uint_as_float(b.x), __uint_as_float(b.y)),
                          ptx::pack_bf16(__uint_as_float(b.z), __uint_as_float(b.w)));
    }

    template <int NT, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
        typename Bf16Stream<Depth>::Step narrow;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                narrow.half[tile][half] = rounded(s.part[tile][2 * half], s.part[tile][2 * half + 1]);
        Bf16Stream<Depth>::template multiply<NT>(acc, narrow, b);
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

    template <class Place>
    struct Lane {
        Place words[2], scales[2];  // [tile]

        __device__ __forceinline__ Lane(Place first, Place second, int lane)
            : words{first + lane * 16, second + lane * 16},
              scales{first + kInt4BlockBytes + lane / 4 * kScaleBytes,
                     second + kInt4BlockBytes + lane / 4 * kScaleBytes} {}
        __device__ __forceinline__ void advance(int bytes) {
            words[0] += bytes, words[1] += bytes, scales[0] += bytes, scales[1] += bytes;
        }
    };

    template <class Place, class From>
    static __device__ __forceinline__ void load(Step& s, const Lane<Place>& l, int step, const From& from) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            s.words[tile] = from.sixteen(l.words[tile] + step * kStepBytes);
            if constexpr (F32Scales) {
                s.scale[tile] = from.sixteen(l.scales[tile] + step * kStepBytes);
            } else {
                const uint2 two = from.eight(l.scales[tile] + step * kStepBytes);
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

    // The A fragments of a row tile's two mma steps in the 32 columns `half`.
    static __device__ __forceinline__ void unpack(uint32_t (&f)[8], const uint4& words, int half) {
        const uint32_t top = half == 0 ? words.x : words.z, low = half == 0 ? words.y : words.w;
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            f[2 * pair] = dequantise(top, pair);
            f[2 * pair + 1] = dequantise(low, pair);
        }
    }

    // sum = scale * partial + sum; scales of rows g and g + 8.
    static __device__ __forceinline__ void add(float (&sum)[4], const float2& scale,
                                               const float (&partial)[4]) {
        sum[0] = fmaf(scale.x, partial[0], sum[0]);
        sum[1] = fmaf(scale.x, partial[1], sum[1]);
        sum[2] = fmaf(scale.y, partial[2], sum[2]);
        sum[3] = fmaf(scale.y, partial[3], sum[3]);
    }

    template <int NT, class B>
    static __device__ __forceinline__ void multiply(float (&acc)[2][NT][4], const Step& s, const B& b) {
        if constexpr (NT <= 2)
            multiply_few<NT>(acc, s, b);
        else
            multiply_many<NT>(acc, s, b);
    }

    // Few token tiles: the scales' fma's of one run behind the first mma steps of the next.
    template <int NT, class B>
    static __device__ __forceinline__ void multiply_few(float (&acc)[2][NT][4], const Step& s, const B& b) {
        float partial[2][2][4];  // [unit % 2][tile]
        uint32_t f[2][8];
        const auto add_unit = [&](int unit) {
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                add(acc[tile][unit % NT], scales(s.scale[tile], unit / NT), partial[unit % 2][tile]);
        };
#pragma unroll
        for (int unit = 0; unit < 2 * NT; ++unit) {
            const int half = unit / NT;
            if (unit % NT == 0) {
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) unpack(f[tile], s.words[tile], half);
            }
            const uint4 x = b(half, unit % NT);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                ptx::mma_bf16_zero(partial[unit % 2][tile], f[tile][0], f[tile][1], f[tile][2], f[tile][3],
                                   x.x, x.y);
            if (unit > 0) add_unit(unit - 1);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile)
                ptx::mma_bf16(partial[unit % 2][tile], f[tile][4], f[tile][5], f[tile][6], f[tile][7], x.z,
                              x.w);
        }
        add_unit(2 * NT - 1);
    }

    // Many: one row tile after the other, so that few fragments and partial sums live at a time and the mma
    // steps of all token tiles stand between two that depend on each other.
    template <int NT, class B>
    static __device__ __forceinline__ void multiply_many(float (&acc)[2][NT][4], const Step& s, const B& b) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint4 x[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) x[n] = b(half, n);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                uint32_t f[8];
                unpack(f, s.words[tile], half);
                float partial[NT][4];
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    ptx::mma_bf16_zero(partial[n], f[0], f[1], f[2], f[3], x[n].x, x[n].y);
#pragma unroll
                for (int n = 0; n < NT; ++n)
                    ptx::mma_bf16(partial[n], f[4], f[5], f[6], f[7], x[n].z, x[n].w);
#pragma unroll
                for (int n = 0; n < NT; ++n) add(acc[tile][n], scales(s.scale[tile], half), partial[n]);
            }
        }
    }
};

}  // namespace kdt::cuda
