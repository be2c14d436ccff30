// The float32 matrix product: every activation type f32, every product an fma on the CUDA cores. It serves
// the `f32` precision, where exactness against the oracle counts and speed does not, and the router's logits
// in both.
//
// A block takes one row tile (two for gated: gate and up); its 8 warps cut K at borders that depend on K
// alone. Lane 4 g + t keeps one accumulator a row (g, g + 8) and token over its own columns (8 t .. 8 t + 7
// of every 32), ascending, by fma; then lanes (t, t ^ 1), (t, t ^ 2); then warps in order. w4a16: w = (q - 8)
// * scale, rounded once.
#include "backend/cuda/gemm.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kWarps = 8;
constexpr int kTokens = 8;

// Columns 8 t .. 8 t + 7 of row g (half 0) or g + 8 of one step of one block.
template <WeightKind Kind>
__device__ __forceinline__ void load_weights(float (&w)[8], const unsigned char* block, int step, int half,
                                             bool f32_scales, int lane) {
    if constexpr (Kind == WeightKind::f32) {
        for (int part = 0; part < 2; ++part) {
            const uint4 v = ptx::load_streaming(block + ((step * 2 + half) * 2 + part) * 512 + lane * 16);
            w[4 * part] = __uint_as_float(v.x);
            w[4 * part + 1] = __uint_as_float(v.y);
            w[4 * part + 2] = __uint_as_float(v.z);
            w[4 * part + 3] = __uint_as_float(v.w);
        }
    } else if constexpr (Kind == WeightKind::bf16) {
        const uint4 v = ptx::load_streaming(block + (step * 2 + half) * 512 + lane * 16);
        const uint32_t words[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 4; ++i) {
            const float2 pair = widen_bf16x2(words[i]);
            w[2 * i] = pair.x;
            w[2 * i + 1] = pair.y;
        }
    } else {
        const uint32_t word = *reinterpret_cast<const uint32_t*>(block + lane * 16 + (step * 2 + half) * 4);
        const unsigned char* scales = block + kInt4BlockBytes;
        const int at = lane / 4 * 4 + step * 2 + half;
        const float scale = f32_scales ? reinterpret_cast<const float*>(scales)[at]
                                       : widen_bf16(reinterpret_cast<const uint16_t*>(scales)[at]);
        for (int j = 0; j < 8; ++j) w[j] = static_cast<float>(static_cast<int>(nibble(word, j)) - 8) * scale;
    }
}

template <WeightKind Kind>
__global__ void __launch_bounds__(kWarps * 32) fma_gemm(const GemmArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const bool gated = a.store == Store::gated, experts = a.table[0] != nullptr;
    float* const partials = reinterpret_cast<float*>(ptx::shared_memory());  // [warp][tile, row][token]

    int head = 0, first = 0, tokens;
    const unsigned char* base[2] = {a.w[0], a.w[1]};
    if (experts) {
        if (static_cast<int>(blockIdx.z) >= __ldcg(a.active_count)) return;
        const int expert = __ldcg(a.active + blockIdx.z);
        base[0] = static_cast<const unsigned char*>(a.table[0][expert]);
        if (gated) base[1] = static_cast<const unsigned char*>(a.table[1][expert]);
        first = __ldcg(a.offset + expert);
        tokens = __ldcg(a.offset + expert + 1) - first;
    } else {
        head = static_cast<int>(blockIdx.z);
        tokens = a.rows.live_count();
    }
    const int first_row = head * a.out;
    const int tile = first_row / kTileRows + static_cast<int>(blockIdx.y);
    if (tile > (first_row + a.out - 1) / kTileRows) return;
    const size_t tile_offset = static_cast<size_t>(tile) * a.k_blocks * a.block_bytes;
    const int step0 = split_border(a.k_blocks * 2, warp, kWarps),
              step1 = split_border(a.k_blocks * 2, warp + 1, kWarps);

    for (int group = 0; group < tokens; group += kTokens) {
        const float* x[kTokens];
#pragma unroll
        for (int i = 0; i < kTokens; ++i) {
            const int token = min(group + i, tokens - 1);
            const int row =
                experts ? a.x_first + __ldcg(a.pairs + first + token) / a.pair_divisor : a.rows.first + token;
            x[i] = a.x + row * a.x_stride + head * a.x_head_stride;
        }
        float acc[2][2][kTokens] = {};
        for (int s = step0; s < step1; ++s) {
            const int column = s * kStepColumns + t * 8;
            const unsigned char* block = base[0] + tile_offset + static_cast<size_t>(s / 2) * a.block_bytes;
            float w[2][2][8];
            load_weights<Kind>(w[0][0], block, s % 2, 0, a.f32_scales, lane);
            load_weights<Kind>(w[0][1], block, s % 2, 1, a.f32_scales, lane);
            if (gated) {
                block = base[1] + tile_offset + static_cast<size_t>(s / 2) * a.block_bytes;
                load_weights<Kind>(w[1][0], block, s % 2, 0, a.f32_scales, lane);
                load_weights<Kind>(w[1][1], block, s % 2, 1, a.f32_scales, lane);
            }
#pragma unroll
            for (int i = 0; i < kTokens; ++i) {
                if (group + i >= tokens) break;
                float v[8];
                if (a.wide && column < a.in) {
                    const float4 low = load_activation4(x[i] + column),
                                 high = load_activation4(x[i] + column + 4);
                    v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
                    v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
                } else {
                    for (int j = 0; j < 8; ++j)
                        v[j] = column + j < a.in ? load_activation(x[i] + column + j) : 0.0f;
                }
                for (int j = 0; j < 8; ++j) {
                    acc[0][0][i] = fmaf(w[0][0][j], v[j], acc[0][0][i]);
                    acc[0][1][i] = fmaf(w[0][1][j], v[j], acc[0][1][i]);
                    if (gated) {
                        acc[1][0][i] = fmaf(w[1][0][j], v[j], acc[1][0][i]);
                        acc[1][1][i] = fmaf(w[1][1][j], v[j], acc[1][1][i]);
                    }
                }
            }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if (m == 1 && !gated) break;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int i = 0; i < kTokens; ++i) {
                    float sum = acc[m][half][i];
                    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
                    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
                    if (t == 0) partials[(warp * 32 + m * 16 + half * 8 + g) * kTokens + i] = sum;
                }
        }
        __syncthreads();
        for (int e = static_cast<int>(threadIdx.x); e < kTileRows * kTokens; e += kWarps * 32) {
            const int token = group + e / kTileRows, row = e % kTileRows;
            const int n = tile * kTileRows + row - first_row;
            if (token >= tokens || n < 0 || n >= a.out) continue;
            const float* p = partials + row * kTokens + e / kTileRows;
            float value = p[0], up = 0.0f;
            for (int w = 1; w < kWarps; ++w) value += p[w * 32 * kTokens];
            if (gated) {
                p += kTileRows * kTokens;
                up = p[0];
                for (int w = 1; w < kWarps; ++w) up += p[w * 32 * kTokens];
                value = silu(value) * up;
            }
            const int y_row = experts ? __ldcg(a.pairs + first + token) : a.rows.first + token;
            float* y = a.y + y_row * a.y_stride + (experts ? 0 : head * a.y_head_stride) + n;
            if (a.store == Store::add) value = __ldcg(y) + value;
            if (a.store == Store::gate) value = silu(__ldcg(y)) * value;
            *y = value;
        }
        __syncthreads();
    }
}

}  // namespace

void launch_fma_gemm(const GemmLaunch& l, WeightKind kind, const GemmArgs& args, int experts) {
    const Launch launch_as{
        l.stream,    l.device,
        l.name,      dim3(1, tiles_of_head(args.out, args.heads), experts > 0 ? experts : args.heads),
        kWarps * 32, kWarps * 32 * kTokens * 4};
    switch (kind) {
        case WeightKind::f32:
            return launch<fma_gemm<WeightKind::f32>>(launch_as, args);
        case WeightKind::bf16:
            return launch<fma_gemm<WeightKind::bf16>>(launch_as, args);
        case WeightKind::w4a16:
            return launch<fma_gemm<WeightKind::w4a16>>(launch_as, args);
    }
}

void launch_gemm(const GemmLaunch& l, WeightKind kind, const GemmArgs& args, int experts) {
    const int splits = product_splits(args.out, args.heads, args.store == Store::gated, experts > 0, args.in);
    switch (kind) {
        case WeightKind::f32:
            return launch_gemm_f32(l, args, experts, splits);
        case WeightKind::bf16:
            return launch_gemm_bf16(l, args, experts, splits);
        case WeightKind::w4a16:
            return args.f32_scales ? launch_gemm_w4a16_f32_scales(l, args, experts, splits)
                                   : launch_gemm_w4a16(l, args, experts, splits);
    }
}

}  // namespace kdt::cuda
