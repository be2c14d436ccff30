#include "backend/cuda/rows.h"

#include <algorithm>
#include <initializer_list>

#include "backend/cuda/cache.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/rope.cuh"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;

template <bool F32>
__global__ void __launch_bounds__(kThreads) embed(const EmbedArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x);
    if (row >= live_rows(a.rows)) return;
    const int width = a.table.in, blocks = column_blocks(width);
    const int column = (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * 8;
    if (column >= width) return;
    const int token = a.token[row];
    float v[8] = {};
    if (token >= 0 &&
        token < a.table.out) {  // a drafter may propose what is no token: such a node is never accepted
        const unsigned char* data = static_cast<const unsigned char*>(a.table.data);
        if (F32) {
            for (int part = 0; part < 2; ++part) {
                const float4 p = *reinterpret_cast<const float4*>(
                    data + element_offset(WeightKind::f32, blocks, token, column + 4 * part));
                v[4 * part] = p.x, v[4 * part + 1] = p.y, v[4 * part + 2] = p.z, v[4 * part + 3] = p.w;
            }
        } else {
            const uint4 p = *reinterpret_cast<const uint4*>(
                data + element_offset(WeightKind::bf16, blocks, token, column));
            const uint32_t words[4] = {p.x, p.y, p.z, p.w};
            for (int i = 0; i < 4; ++i) {
                const float2 pair = widen_bf16x2(words[i]);
                v[2 * i] = pair.x;
                v[2 * i + 1] = pair.y;
            }
        }
    }
    float* y = a.y + static_cast<long long>(row) * width + column;
    if (width % 8 == 0 && reinterpret_cast<uintptr_t>(a.y) % 16 == 0) {
        reinterpret_cast<float4*>(y)[0] = make_float4(v[0], v[1], v[2], v[3]);
        reinterpret_cast<float4*>(y)[1] = make_float4(v[4], v[5], v[6], v[7]);
    } else {
        for (int j = 0; j < 8 && column + j < width; ++j) y[j] = v[j];
    }
}

// Four columns from c on, zeros past the width. `wide`: whole or not at all, and 16-byte aligned.
__device__ __forceinline__ float4 load_columns(const float* x, int c, int width, bool wide) {
    if (wide) return c < width ? load_activation4(x + c) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    float v[4];
    for (int j = 0; j < 4; ++j) v[j] = c + j < width ? load_activation(x + c + j) : 0.0f;
    return make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void store_columns(float* y, int c, int width, bool wide, float4 v) {
    if (wide) {
        if (c < width) *reinterpret_cast<float4*>(y + c) = v;
        return;
    }
    const float each[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4; ++j)
        if (c + j < width) y[c + j] = each[j];
}

__device__ __forceinline__ float add_squares(float sum, float4 v) {
    return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum))));
}

__device__ __forceinline__ float inverse_rms(float sum, int width, float eps, float* scratch) {
    return 1.0f / sqrtf(block_sum(sum, scratch) / static_cast<float>(width) + eps);
}

__device__ __forceinline__ float4 normed(float4 x, float r, float4 w) {
    return make_float4(x.x * r * w.x, x.y * r * w.y, x.z * r * w.z, x.w * r * w.w);
}

// A block a row: thread i has columns 4 i .. 4 i + 3 of every 2048, their squares added ascending by fma.
// With `Parts` of 2048 columns the row stays in registers and all of it is on its way before anything waits;
// 0: wider rows, read twice. The sum is the same.
constexpr int kNormThreads = 512, kNormColumns = kNormThreads * 4;

template <int Parts>
__global__ void __launch_bounds__(kNormThreads, 1) rms_norm(const RmsNormArgs a, bool wide) {
    ptx::grid_launch_next();
    const int row = static_cast<int>(blockIdx.x), first = static_cast<int>(threadIdx.x) * 4;
    const float* const x = a.x + static_cast<long long>(row) * a.x_stride;
    float* const y = a.y + static_cast<long long>(row) * a.width;
    float* const scratch = reinterpret_cast<float*>(ptx::shared_memory());
    if constexpr (Parts > 0) {
        float4 w[Parts], v[Parts];
#pragma unroll
        for (int i = 0; i < Parts; ++i)
            w[i] = load_columns(a.weight, first + i * kNormColumns, a.width, wide);
        ptx::grid_wait();
#pragma unroll
        for (int i = 0; i < Parts; ++i) v[i] = load_columns(x, first + i * kNormColumns, a.width, wide);
        if (row >= live_rows(a.rows)) return;
        if (a.copy != nullptr) {
            float* const copy = a.copy + static_cast<long long>(row) * a.copy_stride;
#pragma unroll
            for (int i = 0; i < Parts; ++i)
                store_columns(copy, first + i * kNormColumns, a.width, wide, v[i]);
        }
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < Parts; ++i) sum = add_squares(sum, v[i]);
        const float r = inverse_rms(sum, a.width, a.eps, scratch);
#pragma unroll
        for (int i = 0; i < Parts; ++i)
            store_columns(y, first + i * kNormColumns, a.width, wide, normed(v[i], r, w[i]));
    } else {
        ptx::grid_wait();
        if (row >= live_rows(a.rows)) return;
        float sum = 0.0f;
        for (int c = first; c < a.width; c += kNormColumns) {
            const float4 v = load_columns(x, c, a.width, wide);
            if (a.copy != nullptr)
                store_columns(a.copy + static_cast<long long>(row) * a.copy_stride, c, a.width, wide, v);
            sum = add_squares(sum, v);
        }
        const float r = inverse_rms(sum, a.width, a.eps, scratch);
        for (int c = first; c < a.width; c += kNormColumns)
            store_columns(
                y, c, a.width, wide,
                normed(load_columns(x, c, a.width, wide), r, load_columns(a.weight, c, a.width, wide)));
    }
}

template <bool Bf16>
__device__ __forceinline__ void store_latent(void* to, int column, float value) {
    if (Bf16)
        static_cast<uint16_t*>(to)[column] = static_cast<uint16_t>(ptx::pack_bf16(value, 0.0f));
    else
        static_cast<float*>(to)[column] = value;
}

// A block a row: thread i has columns 4 i .. 4 i + 3 of every 1024 of the latent (one pass in every model
// that there is), the last warps the rope part.
template <bool Bf16>
__global__ void __launch_bounds__(kThreads) write_latent(const WriteLatentArgs a, bool wide) {
    ptx::grid_launch_next();
    constexpr int kColumns = kThreads * 4;
    const int row = static_cast<int>(blockIdx.x), thread = static_cast<int>(threadIdx.x), first = thread * 4;
    const int width = a.latent + a.rope.rope, half = a.rope.rope / 2;
    const float* const x = a.ckv + static_cast<long long>(row) * width;
    float* const scratch = reinterpret_cast<float*>(ptx::shared_memory());
    const float4 weight = load_columns(a.weight, first, a.latent, wide);
    ptx::grid_wait();
    const float4 mine = load_columns(x, first, a.latent, wide);
    const int position = __ldcg(a.batch.position + row), ancestors = __ldcg(a.batch.ancestor_count + row),
              sequence = __ldcg(a.batch.sequence + row);
    if (row >= live_rows(a.rows)) return;

    float2 rotated = make_float2(0.0f, 0.0f);
    const int at = min(max(position, 0), a.rope.positions - 1);
    const auto rotate_pair = [&](int j) {
        const int2 pair = rope_pair(j, a.rope.rope, a.rope.interleaved);
        const long long angle = static_cast<long long>(at) * half + j;
        return rotate(load_activation(x + a.latent + pair.x), load_activation(x + a.latent + pair.y),
                      a.rope.cos[angle], a.rope.sin[angle]);
    };
    const int j0 = kThreads - 1 - thread;
    if (j0 < half) rotated = rotate_pair(j0);

    long long slot = row;
    unsigned char* base = static_cast<unsigned char*>(a.cache.scratch);
    if (ancestors == 0) {
        slot = page_slot(a.cache, sequence, position);
        base = static_cast<unsigned char*>(a.cache.pages);
    }
    if (slot < 0) return;  // the whole block
    void* const to = base + slot * width * (Bf16 ? 2 : 4);

    float sum = add_squares(0.0f, mine);
    for (int c = first + kColumns; c < a.latent; c += kColumns)
        sum = add_squares(sum, load_columns(x, c, a.latent, wide));
    const float r = inverse_rms(sum, a.latent, a.eps, scratch);
    const auto store = [&](int c, float4 v) {
        if (wide) {
            if (c >= a.latent) return;
            if (Bf16)
                *reinterpret_cast<uint2*>(static_cast<uint16_t*>(to) + c) =
                    make_uint2(ptx::pack_bf16(v.x, v.y), ptx::pack_bf16(v.z, v.w));
            else
                *reinterpret_cast<float4*>(static_cast<float*>(to) + c) = v;
            return;
        }
        const float each[4] = {v.x, v.y, v.z, v.w};
        for (int j = 0; j < 4; ++j)
            if (c + j < a.latent) store_latent<Bf16>(to, c + j, each[j]);
    };
    store(first, normed(mine, r, weight));
    for (int c = first + kColumns; c < a.latent; c += kColumns)
        store(c, normed(load_columns(x, c, a.latent, wide), r, load_columns(a.weight, c, a.latent, wide)));
    for (int j = j0; j < half; j += kThreads) {
        const float2 y = j == j0 ? rotated : rotate_pair(j);
        const int2 pair = rope_pair(j, a.rope.rope, a.rope.interleaved);
        store_latent<Bf16>(to, a.latent + pair.x, y.x);
        store_latent<Bf16>(to, a.latent + pair.y, y.y);
    }
}

// The rope part of the absorbed query; the rest of it is a matrix product.
__global__ void __launch_bounds__(kThreads) rope_query(const AbsorbQueryArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x);
    if (row >= live_rows(a.rows)) return;
    const int rope = a.rope.rope, half = rope / 2;
    const int i = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
    if (i >= a.heads * half) return;
    const int head = i / half, j = i % half;
    const int at = min(max(a.batch.position[row], 0), a.rope.positions - 1);
    const long long head_row = static_cast<long long>(row) * a.heads + head;
    const float* x = a.q + head_row * (a.nope + rope) + a.nope;
    float* y = a.out + head_row * (a.latent + rope) + a.latent;
    const int2 pair = rope_pair(j, rope, a.rope.interleaved);
    const long long angle = static_cast<long long>(at) * half + j;
    const float2 v = rotate(load_activation(x + pair.x), load_activation(x + pair.y), a.rope.cos[angle],
                            a.rope.sin[angle]);
    y[pair.x] = v.x;
    y[pair.y] = v.y;
}

__global__ void __launch_bounds__(kThreads) gather_rows(const GatherRowsArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x);
    if (row >= live_rows(a.rows)) return;
    const int c = static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x);
    if (c < a.width)
        a.y[static_cast<long long>(row) * a.y_stride + c] =
            load_activation(a.x + static_cast<long long>(a.index[row]) * a.width + c);
}

// Scratch latents of the accepted path to their final slots: a block a layer, a warp a row. Scratch and pages
// never overlap, so that order is free. The latent is on its way while the slot is looked up.
constexpr int kCommitThreads = 512;

template <class Word>
__global__ void __launch_bounds__(kCommitThreads) commit(const CommitArgs a, int row_bytes) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    constexpr int kWarps = kCommitThreads / 32, kAhead = 4;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    int from_row = __ldcg(a.path + warp);  // past the length: not looked at
    const int length = min(__ldcg(a.length), kMaxTreeRows), start = __ldcg(a.start),
              sequence = __ldcg(a.sequence);
    unsigned char* const pages = static_cast<unsigned char*>(a.cache.pages) + blockIdx.x * a.page_distance;
    const unsigned char* const scratch =
        static_cast<const unsigned char*>(a.cache.scratch) + blockIdx.x * a.scratch_distance;
    const int words = row_bytes / static_cast<int>(sizeof(Word));
    for (int j = warp; j < length; j += kWarps) {
        if (j != warp) from_row = __ldcg(a.path + j);
        const int position = start + j, index = position / kPageSize;
        const int page = position >= 0 && index < a.cache.pages_per_sequence
                             ? __ldcg(a.cache.page_table +
                                      static_cast<long long>(sequence) * a.cache.pages_per_sequence + index)
                             : -1;
        const Word* const from =
            reinterpret_cast<const Word*>(scratch + static_cast<long long>(from_row) * row_bytes);
        for (int first = lane; first < words; first += 32 * kAhead) {
            Word w[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + 32 * i < words) w[i] = __ldcg(from + first + 32 * i);
            if (page < 0 || page >= a.cache.page_count) continue;
            Word* const to = reinterpret_cast<Word*>(
                pages + (static_cast<long long>(page) * kPageSize + position % kPageSize) * row_bytes);
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + 32 * i < words) to[first + 32 * i] = w[i];
        }
    }
}

dim3 grid_of(int rows, int columns) {
    return dim3(static_cast<unsigned>(rows), static_cast<unsigned>((columns + kThreads - 1) / kThreads));
}

// Whether 16-byte accesses are possible.
bool aligned(std::initializer_list<const void*> places) {
    return std::all_of(places.begin(), places.end(),
                       [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; });
}

}  // namespace

void launch_embed(const GemmLaunch& l, const EmbedArgs& args) {
    const Launch as{l.stream, l.device, l.name, grid_of(args.rows.capacity, (args.table.in + 7) / 8),
                    kThreads};
    if (args.table.kind == WeightKind::f32)
        launch<embed<true>>(as, args);
    else
        launch<embed<false>>(as, args);
}

void launch_rms_norm(const GemmLaunch& l, const RmsNormArgs& args) {
    const bool wide = args.width % 4 == 0 && args.x_stride % 4 == 0 && args.copy_stride % 4 == 0 &&
                      aligned({args.x, args.weight, args.y, args.copy});
    const Launch as{
        l.stream, l.device, l.name, grid_of(args.rows.capacity, 1), kNormThreads, kNormThreads / 32 * 4};
    if (args.width <= kNormColumns)
        launch<rms_norm<1>>(as, args, wide);
    else if (args.width <= 2 * kNormColumns)
        launch<rms_norm<2>>(as, args, wide);
    else if (args.width <= 4 * kNormColumns)
        launch<rms_norm<4>>(as, args, wide);
    else
        launch<rms_norm<0>>(as, args, wide);
}

void launch_write_latent(const GemmLaunch& l, const WriteLatentArgs& args, bool bf16_cache) {
    const bool wide = args.latent % 4 == 0 && args.rope.rope % 4 == 0 &&
                      aligned({args.ckv, args.weight, args.cache.pages, args.cache.scratch});
    const Launch as{l.stream, l.device, l.name, grid_of(args.rows.capacity, 1), kThreads, kThreads / 32 * 4};
    if (bf16_cache)
        launch<write_latent<true>>(as, args, wide);
    else
        launch<write_latent<false>>(as, args, wide);
}

void launch_rope_query(const GemmLaunch& l, const AbsorbQueryArgs& args) {
    launch<rope_query>({l.stream, l.device, l.name,
                        grid_of(args.rows.capacity, args.heads * (args.rope.rope / 2)), kThreads},
                       args);
}

void launch_gather_rows(const GemmLaunch& l, const GatherRowsArgs& args) {
    launch<gather_rows>({l.stream, l.device, l.name, grid_of(args.rows.capacity, args.width), kThreads},
                        args);
}

void launch_commit(const GemmLaunch& l, const CommitArgs& args, bool bf16_cache) {
    const int row_bytes = args.width * (bf16_cache ? 2 : 4);
    const Launch as{l.stream, l.device, l.name, dim3(static_cast<unsigned>(args.layers)), kCommitThreads};
    const size_t places = reinterpret_cast<uintptr_t>(args.cache.pages) |
                          reinterpret_cast<uintptr_t>(args.cache.scratch) | args.page_distance |
                          args.scratch_distance | static_cast<size_t>(row_bytes);
    if (places % sizeof(uint4) == 0)
        launch<commit<uint4>>(as, args, row_bytes);
    else
        launch<commit<uint16_t>>(as, args, row_bytes);
}

}  // namespace kdt::cuda
