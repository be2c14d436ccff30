// The tensor-core matrix product (docs/kernels/gemm.md). Weights are the A operand (16 outputs), tokens the B
// operand (8 tokens): at few tokens the weight stream is all there is, and it is read once for up to 72
// tokens.
//
// A warp owns two row tiles (32 outputs, or 16 outputs of gate and up) over one K-split and streams them
// through a pipeline of its own in shared memory; activations are rounded to bf16 by the block, a chunk of
// columns at a time. Splits are the blocks of a cluster; partial sums are added in split order through
// distributed shared memory.
//
// Order of operations of one output (all row counts): accumulator = 0; for every 32 columns of the split,
// ascending: f32, bf16 weights: two mma steps into the accumulator; w4a16: two mma steps into zero, then
// accumulator = fma(scale, partial, accumulator). Then the sum over splits, ascending.
#pragma once

#include "backend/cuda/gemm.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

template <WeightKind Kind>
struct WeightStream;

// A fragment of 16 x 32 weights: a[0..3] for the first mma step, a[4..7] for the second.
struct Fragment {
    uint32_t a[8];
};

template <>
struct WeightStream<WeightKind::bf16> {
    static constexpr int kStepColumns = 32;
    static constexpr int kMaxStageBytes = 2 * 1024;

    static __device__ __forceinline__ int step_bytes(int) { return 1024; }

    static __device__ __forceinline__ void issue(uint32_t slot, const unsigned char* const (&p)[2], size_t at,
                                                 int, int lane) {
        for (int tile = 0; tile < 2; ++tile)
            for (int half = 0; half < 2; ++half)
                ptx::copy_async_16(slot + tile * 1024 + half * 512 + lane * 16,
                                   p[tile] + at + half * 512 + lane * 16);
    }

    static __device__ __forceinline__ Fragment load(const unsigned char* slot, int tile, int lane) {
        const uint4 top = *reinterpret_cast<const uint4*>(slot + tile * 1024 + lane * 16);
        const uint4 low = *reinterpret_cast<const uint4*>(slot + tile * 1024 + 512 + lane * 16);
        return {{top.x, low.x, top.y, low.y, top.z, low.z, top.w, low.w}};
    }
};

template <>
struct WeightStream<WeightKind::f32> {
    static constexpr int kStepColumns = 32;
    static constexpr int kMaxStageBytes = 2 * 2048;

    static __device__ __forceinline__ int step_bytes(int) { return 2048; }

    static __device__ __forceinline__ void issue(uint32_t slot, const unsigned char* const (&p)[2], size_t at,
                                                 int, int lane) {
        for (int tile = 0; tile < 2; ++tile)
            for (int part = 0; part < 4; ++part)
                ptx::copy_async_16(slot + tile * 2048 + part * 512 + lane * 16,
                                   p[tile] + at + part * 512 + lane * 16);
    }

    static __device__ __forceinline__ Fragment load(const unsigned char* slot, int tile, int lane) {
        float4 v[4];  // [half][columns 0..3, 4..7]
        for (int part = 0; part < 4; ++part)
            v[part] = *reinterpret_cast<const float4*>(slot + tile * 2048 + part * 512 + lane * 16);
        Fragment f;
        for (int step = 0; step < 2; ++step) {
            f.a[4 * step] = ptx::pack_bf16(v[step].x, v[step].y);
            f.a[4 * step + 1] = ptx::pack_bf16(v[2 + step].x, v[2 + step].y);
            f.a[4 * step + 2] = ptx::pack_bf16(v[step].z, v[step].w);
            f.a[4 * step + 3] = ptx::pack_bf16(v[2 + step].z, v[2 + step].w);
        }
        return f;
    }
};

template <>
struct WeightStream<WeightKind::w4a16> {
    static constexpr int kStepColumns = 64;
    static constexpr int kMaxStageBytes = 2 * (kInt4BlockBytes + 128);

    static __device__ __forceinline__ int step_bytes(int block_bytes) { return block_bytes; }

    static __device__ __forceinline__ void issue(uint32_t slot, const unsigned char* const (&p)[2], size_t at,
                                                 int block_bytes, int lane) {
        for (int tile = 0; tile < 2; ++tile)
            ptx::copy_async_16(slot + tile * block_bytes + lane * 16, p[tile] + at + lane * 16);
        const int pieces = (block_bytes - kInt4BlockBytes) / 16;  // of scales: 4 or 8
        if (lane < 2 * pieces) {
            const int tile = lane >= pieces;
            const int from = kInt4BlockBytes + (lane - tile * pieces) * 16;
            ptx::copy_async_16(slot + tile * block_bytes + from, (tile ? p[1] : p[0]) + at + from);
        }
    }

    // 128 + q in bf16 is the bit pattern 0x4300 | q; subtracting 136 is exact.
    static __device__ __forceinline__ uint32_t dequantise(uint32_t word, int pair) {
        return ptx::subtract_bf16x2((word >> (4 * pair) & 0x000F000Fu) | 0x43004300u, 0x43084308u);
    }

    static __device__ __forceinline__ Fragment fragment(uint32_t top, uint32_t low) {
        Fragment f;
        for (int pair = 0; pair < 4; ++pair) {
            f.a[2 * pair] = dequantise(top, pair);
            f.a[2 * pair + 1] = dequantise(low, pair);
        }
        return f;
    }

    // scale[step][half] of rows g and g + 8.
    static __device__ __forceinline__ void scales(float (&scale)[4], const unsigned char* block, bool f32,
                                                  int g) {
        if (f32) {
            const float4 v = *reinterpret_cast<const float4*>(block + kInt4BlockBytes + g * 16);
            scale[0] = v.x, scale[1] = v.y, scale[2] = v.z, scale[3] = v.w;
        } else {
            const uint2 v = *reinterpret_cast<const uint2*>(block + kInt4BlockBytes + g * 8);
            const float2 first = widen_bf16x2(v.x), second = widen_bf16x2(v.y);
            scale[0] = first.x, scale[1] = first.y, scale[2] = second.x, scale[3] = second.y;
        }
    }
};

// accumulators[tile][token tile] += weights of one pipeline step . activations.
template <WeightKind Kind, int NT>
__device__ __forceinline__ void multiply_step(float (&acc)[2][NT][4], const unsigned char* slot,
                                              int block_bytes, bool f32_scales, const unsigned char* xs,
                                              int tokens, int lane) {
    using Stream = WeightStream<Kind>;
    if constexpr (Kind == WeightKind::w4a16) {
        uint4 words[2];
        float scale[2][4];
        for (int tile = 0; tile < 2; ++tile) {
            words[tile] = *reinterpret_cast<const uint4*>(slot + tile * block_bytes + lane * 16);
            Stream::scales(scale[tile], slot + tile * block_bytes, f32_scales, lane / 4);
        }
#pragma unroll
        for (int step = 0; step < 2; ++step) {
            Fragment f[2];
            for (int tile = 0; tile < 2; ++tile)
                f[tile] = step == 0 ? Stream::fragment(words[tile].x, words[tile].y)
                                    : Stream::fragment(words[tile].z, words[tile].w);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (NT > 1 && n * 8 >= tokens) break;
                const uint4 b = *reinterpret_cast<const uint4*>(xs + (step * NT + n) * 512 + lane * 16);
#pragma unroll
                for (int tile = 0; tile < 2; ++tile) {
                    const uint32_t (&a)[8] = f[tile].a;
                    float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
                    ptx::mma_bf16(partial, a[0], a[1], a[2], a[3], b.x, b.y);
                    ptx::mma_bf16(partial, a[4], a[5], a[6], a[7], b.z, b.w);
                    const float top = scale[tile][2 * step], low = scale[tile][2 * step + 1];
                    float (&sum)[4] = acc[tile][n];
                    sum[0] = fmaf(top, partial[0], sum[0]);
                    sum[1] = fmaf(top, partial[1], sum[1]);
                    sum[2] = fmaf(low, partial[2], sum[2]);
                    sum[3] = fmaf(low, partial[3], sum[3]);
                }
            }
        }
    } else {
        const Fragment f[2] = {Stream::load(slot, 0, lane), Stream::load(slot, 1, lane)};
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            if (NT > 1 && n * 8 >= tokens) break;
            const uint4 b = *reinterpret_cast<const uint4*>(xs + n * 512 + lane * 16);
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                const uint32_t (&a)[8] = f[tile].a;
                ptx::mma_bf16(acc[tile][n], a[0], a[1], a[2], a[3], b.x, b.y);
                ptx::mma_bf16(acc[tile][n], a[4], a[5], a[6], a[7], b.z, b.w);
            }
        }
    }
}

// Eight consecutive activations, zero past the end of the row.
__device__ __forceinline__ void load_eight(float (&v)[8], const float* row, int column, int in, bool wide) {
    if (wide) {
        const float4 a = load_activation4(row + column), b = load_activation4(row + column + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
        for (int j = 0; j < 8; ++j) v[j] = column + j < in ? load_activation(row + column + j) : 0.0f;
    }
}

// Waits until this warp's oldest pending step of `stages` - 1 has landed.
__device__ __forceinline__ void wait_oldest(int stages) {
    if (stages == 16)
        ptx::copy_async_wait<14>();
    else if (stages == 8)
        ptx::copy_async_wait<6>();
    else if (stages == 4)
        ptx::copy_async_wait<2>();
    else
        ptx::copy_async_wait<0>();
    __syncwarp();
}

// Final value of one output: the sum over splits in order, then what the op does with it.
__device__ __forceinline__ float sum_splits(const float* mine, int splits) {
    if (splits == 1) return *mine;
    float sum = ptx::cluster_load(mine, 0);
    for (int s = 1; s < splits; ++s) sum += ptx::cluster_load(mine, static_cast<uint32_t>(s));
    return sum;
}

template <WeightKind Kind, int NT>
__global__ void __launch_bounds__(256, NT <= 2 ? 2 : 1) gemm(const GemmArgs a) {
    using Stream = WeightStream<Kind>;
    constexpr int kTokens = NT * 8;
    constexpr int kItems = NT == 9 ? 3 : 2;  // groups of 8 activations that a thread carries
    constexpr int kStepsPerBlock = kBlockColumns / Stream::kStepColumns;

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
    const int split = static_cast<int>(blockIdx.x), splits = static_cast<int>(gridDim.x);
    const int part = static_cast<int>(blockIdx.y);
    const int chunk = chunk_columns(warps, NT);
    const bool gated = a.store == Store::gated;
    const bool experts = a.pairs != nullptr;
    ptx::grid_launch_next();

    // shared memory: rows | two chunks of activations | weight pipelines; partial sums reuse the last two
    unsigned char* const shared = ptx::shared_memory();
    int32_t* const x_row = reinterpret_cast<int32_t*>(shared);
    int32_t* const y_row = x_row + kTokens;
    unsigned char* const xs = shared + (kTokens * 8 + 127) / 128 * 128;
    const int xs_bytes = kTokens * chunk * 2;
    unsigned char* const pipeline =
        xs + 2 * xs_bytes + warp * a.stages * (2 * Stream::step_bytes(a.block_bytes));
    const uint32_t pipeline_at = ptx::shared_address(pipeline);
    float* const partials = reinterpret_cast<float*>(xs);
    const int partial_stride = warps * 32 + 4;

    // which rows of which matrix
    int head = 0, first_token = 0;
    const unsigned char* base[2] = {a.w[0], a.w[1]};
    if (experts) {
        ptx::grid_wait();
        if (static_cast<int>(blockIdx.z) >= __ldcg(a.active_count)) return;
        const int expert = __ldcg(a.active + blockIdx.z);
        base[0] = static_cast<const unsigned char*>(a.table[0][expert]);
        if (gated) base[1] = static_cast<const unsigned char*>(a.table[1][expert]);
        first_token = __ldcg(a.offset + expert);
        head = expert;  // only to find the end of its pairs
    } else {
        head = static_cast<int>(blockIdx.z) % a.heads;
        first_token = static_cast<int>(blockIdx.z) / a.heads * kTokens;
    }
    const int first_row = experts ? 0 : head * a.out;
    const int first_tile = first_row / kTileRows;
    const int last_tile = (first_row + a.out - 1) / kTileRows;
    const int width = gated ? 1 : 2;  // tiles of outputs a warp
    const int my_tile = first_tile + (part * warps + warp) * width;
    const bool busy = my_tile <= last_tile;
    const int block0 = split_border(a.k_blocks, split, splits),
              block1 = split_border(a.k_blocks, split + 1, splits);
    const int steps = (block1 - block0) * kStepsPerBlock;
    const int chunk_steps = chunk / Stream::kStepColumns;
    const int step_bytes = Stream::step_bytes(a.block_bytes);
    const int stage_bytes = 2 * step_bytes;

    const unsigned char* from[2];
    {
        const int second = gated ? my_tile : min(my_tile + 1, last_tile);
        const size_t row = static_cast<size_t>(a.k_blocks) * a.block_bytes;
        const size_t column = static_cast<size_t>(block0) * a.block_bytes;
        from[0] = base[0] + min(my_tile, last_tile) * row + column;
        from[1] = (gated ? base[1] : base[0]) + second * row + column;
    }
    // Weights depend on no earlier kernel: their first steps are on the way before the wait.
    const auto issue = [&](int step) {
        if (busy && step < steps)
            Stream::issue(pipeline_at + step % a.stages * stage_bytes, from,
                          static_cast<size_t>(step) * step_bytes, a.block_bytes, lane);
        ptx::copy_async_commit();
    };

    int tokens_left;
    if (!experts) {
        for (int i = 0; i < a.stages - 1; ++i) issue(i);
        ptx::grid_wait();
        tokens_left = min(kTokens, a.rows.live_count() - first_token);
    } else {
        tokens_left = __ldcg(a.offset + head + 1) - first_token;
    }

    bool primed = !experts;
    while (tokens_left > 0) {
        const int tokens = min(tokens_left, kTokens);
        if (!primed)
            for (int i = 0; i < a.stages - 1; ++i) issue(i);
        primed = false;
        for (int i = thread; i < kTokens; i += threads) {
            int x = 0, y = 0;
            if (i < tokens) {
                x = y = a.rows.first + first_token + i;
                if (experts) {
                    y = __ldcg(a.pairs + first_token + i);
                    x = a.x_first + y / a.pair_divisor;
                }
            }
            x_row[i] = x;
            y_row[i] = y;
        }
        __syncthreads();

        // activations: item (k32, token tile, lane) -> 8 columns of one token, in B fragment order
        const int chunks = (steps + chunk_steps - 1) / chunk_steps;
        const int items = kTokens * chunk / 8;
        float carried[kItems][8];
        const auto load_chunk = [&](int c) {
#pragma unroll
            for (int n = 0; n < kItems; ++n) {
                const int item = thread + n * threads;
                const int token = item / 32 % NT * 8 + lane / 4;
                const int column = block0 * kBlockColumns + c * chunk + item / 32 / NT * 32 + lane % 4 * 8;
                for (int j = 0; j < 8; ++j) carried[n][j] = 0.0f;
                if (item < items && token < tokens && column < min(a.in, block1 * kBlockColumns))
                    load_eight(carried[n], a.x + x_row[token] * a.x_stride + head * a.x_head_stride, column,
                               a.in, a.wide);
            }
        };
        const auto store_chunk = [&](int c) {
            unsigned char* const to = xs + (c & 1) * xs_bytes;
#pragma unroll
            for (int n = 0; n < kItems; ++n) {
                const int item = thread + n * threads;
                if (item >= items) continue;
                const float (&v)[8] = carried[n];
                *reinterpret_cast<uint4*>(to + item * 16) =
                    make_uint4(ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]),
                               ptx::pack_bf16(v[4], v[5]), ptx::pack_bf16(v[6], v[7]));
            }
        };
        load_chunk(0);
        store_chunk(0);
        __syncthreads();

        float acc[2][NT][4];
        for (int tile = 0; tile < 2; ++tile)
            for (int n = 0; n < NT; ++n)
                for (int i = 0; i < 4; ++i) acc[tile][n][i] = 0.0f;

        int step = 0;
        for (int c = 0; c < chunks; ++c) {
            if (c + 1 < chunks) load_chunk(c + 1);
            const unsigned char* xs_step = xs + (c & 1) * xs_bytes;
            const int end = min(steps, (c + 1) * chunk_steps);
            for (; step < end; ++step, xs_step += Stream::kStepColumns / 32 * NT * 512) {
                wait_oldest(a.stages);
                issue(step + a.stages - 1);
                if (busy)
                    multiply_step<Kind, NT>(acc, pipeline + step % a.stages * stage_bytes, a.block_bytes,
                                            a.f32_scales, xs_step, tokens, lane);
            }
            if (c + 1 < chunks) store_chunk(c + 1);
            __syncthreads();
        }
        ptx::copy_async_wait<0>();
        __syncthreads();

        // partial sums, tokens as rows so that neighbouring threads hold neighbouring outputs
        {
            const int g = lane / 4, t = lane % 4;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                if (n * 8 >= tokens) break;
                for (int tile = 0; tile < 2; ++tile)
                    for (int i = 0; i < 4; ++i)
                        partials[(n * 8 + 2 * t + i % 2) * partial_stride + warp * 32 + tile * 16 + g +
                                 i / 2 * 8] = acc[tile][n][i];
            }
        }
        if (splits > 1)
            ptx::cluster_sync();
        else
            __syncthreads();
        const int outputs = warps * width * 16;
        for (int e = split * threads + thread; e < tokens * outputs; e += splits * threads) {
            const int token = e / outputs, o = e % outputs;
            const int n = (first_tile + part * warps * width) * kTileRows + o - first_row;
            if (n < 0 || n >= a.out) continue;
            const float* mine = partials + token * partial_stride + (gated ? o / 16 * 32 + o % 16 : o);
            float value = sum_splits(mine, splits);
            if (gated) value = silu(value) * sum_splits(mine + 16, splits);
            float* y = a.y + y_row[token] * a.y_stride + (experts ? 0 : head * a.y_head_stride) + n;
            if (a.store == Store::add) value = __ldcg(y) + value;
            if (a.store == Store::gate) value = silu(__ldcg(y)) * value;
            *y = value;
        }
        if (splits > 1)
            ptx::cluster_sync();  // nobody leaves or overwrites what others still read
        else
            __syncthreads();
        tokens_left -= tokens;
        first_token += tokens;
        if (!experts) break;
    }
    if (!experts) ptx::copy_async_wait<0>();
}

template <WeightKind Kind>
void launch_gemm_as(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    GemmArgs a = args;
    const int nt = experts > 0 ? expert_token_tiles(a.rows.count) : token_tiles(a.rows.count);
    const int tiles = tiles_of_head(a.out, a.heads) * (a.store == Store::gated ? 2 : 1);
    const int groups = experts > 0 ? experts : a.heads * ((a.rows.count + nt * 8 - 1) / (nt * 8));
    const int warps = gemm_warps(tiles, splits * (experts > 0 ? std::min(experts, 8) : groups), nt, Kind);
    a.stages = gemm_stages(warps, Kind);
    const int row_bytes = (nt * 8 * 8 + 127) / 128 * 128;
    const int step_bytes = Kind == WeightKind::w4a16 ? a.block_bytes : a.block_bytes / 2;
    const int stream_bytes = 2 * nt * 8 * chunk_columns(warps, nt) * 2 + warps * a.stages * 2 * step_bytes;
    const int partial_bytes = nt * 8 * (warps * 32 + 4) * 4;
    const Launch launch_as{l.stream,   l.device,
                           l.name,     dim3(splits, (tiles / 2 + tiles % 2 + warps - 1) / warps, groups),
                           warps * 32, row_bytes + std::max(stream_bytes, partial_bytes),
                           splits};
    switch (nt) {
        case 1:
            return launch<gemm<Kind, 1>>(launch_as, a);
        case 2:
            return launch<gemm<Kind, 2>>(launch_as, a);
        case 4:
            return launch<gemm<Kind, 4>>(launch_as, a);
        default:
            return launch<gemm<Kind, 9>>(launch_as, a);
    }
}

}  // namespace kdt::cuda
