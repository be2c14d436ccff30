// Attention of one row and 16 or 32 of its heads over one part of its keys, on the tensor cores.
//
// Keys arrive in chunks of 64 at absolute multiples of 64 of the virtual sequence, whether they lie in one
// page or are gathered from a page's end and the tree's scratch rows. Per chunk: scores (heads x keys, K =
// latent + rope, cut at four fixed borders, one accumulator each, added in order), online softmax in base 2,
// output (heads x latent, K = keys). A block serves a single row, so nothing of another row is ever near its
// arithmetic.
//
// Shared memory: K chunk [64][row] with 16-byte units xor-ed by key % 8 | exchange of partial scores
// [4][16][72] | P [tiles x 16][64] bf16, xor-ed by row % 8 | factors | state of each head's softmax | key
// addresses.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kStages = 2;  // a chunk is loaded and released in two halves
constexpr int kStageKeys = kChunkSize / kStages;
constexpr int kExchangeStride = 72;
constexpr int kExchangeBytes = 4 * 16 * kExchangeStride * 4;
constexpr int kScoreSteps = 9;   // K steps of 16 in a quarter of 576
constexpr int kOutputTiles = 8;  // column tiles of 8 that a warp owns

// Latent and rope widths: of every released model, known at compile time; or of any other, up to the same.
struct ReleasedShape {
    static __device__ __forceinline__ constexpr int latent(const AttentionArgs&) { return 512; }
    static __device__ __forceinline__ constexpr int width(const AttentionArgs&) { return 576; }
};
struct AnyShape {
    static __device__ __forceinline__ int latent(const AttentionArgs& a) { return a.latent; }
    static __device__ __forceinline__ int width(const AttentionArgs& a) { return a.latent + a.rope; }
};

KDT_HOST_DEVICE constexpr int key_row_bytes(
    int width) {  // in shared memory: whole groups of eight 16-byte units
    return (width * 2 + 127) / 128 * 128;
}

// Over the 16 lanes of a half warp, as the tree (l, l ^ 8), (l, l ^ 4), ...
__device__ __forceinline__ float half_warp_max(float x) {
    for (int offset = 8; offset > 0; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
    return x;
}

__device__ __forceinline__ float half_warp_sum(float x) {
    for (int offset = 8; offset > 0; offset >>= 1) x += __shfl_xor_sync(0xFFFFFFFFu, x, offset);
    return x;
}

template <int MT, class Shape>
__global__ void __launch_bounds__(kThreads) attend(const AttentionArgs a) {
    ptx::grid_launch_next();
    const int latent = Shape::latent(a), width = Shape::width(a);
    const int units = width / 8, row_bytes = key_row_bytes(width);
    const int quarter = (width / 16 + (width % 16 != 0) + 3) / 4;  // K steps of a quarter
    const int all_steps = width / 16 + (width % 16 != 0);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const int kq = warp % 4, nh = warp / 4;

    unsigned char* const keys = ptx::shared_memory();
    float* const exchange = reinterpret_cast<float*>(keys + kChunkSize * row_bytes);
    unsigned char* const p_tile = reinterpret_cast<unsigned char*>(exchange) + kExchangeBytes;
    float* const factor = reinterpret_cast<float*>(p_tile + MT * 16 * 128);
    // Maximum and sum of each head in this split. Warp w keeps rows 2 w and 2 w + 1 of each tile.
    float2* const state = reinterpret_cast<float2*>(factor + MT * 16);
    const unsigned char** const address =
        reinterpret_cast<const unsigned char**>(state + MT * 16);  // [2][64]

    const uint32_t keys_at = ptx::shared_address(keys), p_at = ptx::shared_address(p_tile);

    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    const int row = a.rows.first + static_cast<int>(blockIdx.z);
    const int head0 = static_cast<int>(blockIdx.y) * MT * 16;
    const KeySpan span = key_span(a.batch, row);
    const int2 splits = splits_of_block(static_cast<int>(blockIdx.x), a.by_group);
    const int first_key = split_start(splits.x), end_key = min(split_start(splits.y), span.count);
    if (first_key >= end_key) return;
    const int chunk0 = first_key / kChunkSize, chunk1 = (end_key + kChunkSize - 1) / kChunkSize;

    // Columns past the width are zero for good; the copies below never touch them.
    if (units * 16 < row_bytes)
        for (int i = thread; i < kChunkSize * row_bytes / 16; i += kThreads)
            *reinterpret_cast<uint4*>(keys + i * 16) = make_uint4(0, 0, 0, 0);

    const auto key_address = [&](int chunk) {
        return key_row(a.cache, a.batch, row, span.prefix, span.ancestors, chunk * kChunkSize + thread,
                       width * 2);
    };
    const auto load_stage = [&](int chunk, int stage) {  // a warp takes whole keys
#pragma unroll 1
        for (int key = stage * kStageKeys + warp; key < (stage + 1) * kStageKeys; key += kThreads / 32) {
            const unsigned char* from = address[(chunk & 1) * kChunkSize + key];
            const bool valid = from != nullptr;
            if (!valid) from = static_cast<const unsigned char*>(a.cache.pages);
            const uint32_t to = keys_at + key * row_bytes;
            for (int unit = lane; unit < units; unit += 32)
                ptx::copy_async_16(to + ((unit ^ (key & 7)) << 4), from + unit * 16, valid);
        }
        ptx::copy_async_commit();
    };
    if (thread < kChunkSize) address[(chunk0 & 1) * kChunkSize + thread] = key_address(chunk0);
    __syncthreads();
    for (int stage = 0; stage < kStages; ++stage) load_stage(chunk0, stage);

    // Queries as A fragments, rounded to bf16 once, for this warp's quarter of the columns.
    uint32_t q[MT][kScoreSteps][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < kScoreSteps; ++i)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const int head = head0 + m * 16 + g + r % 2 * 8;
                const int column = (kq * quarter + i) * 16 + 2 * t + r / 2 * 8;
                float2 v = make_float2(0.0f, 0.0f);
                if (i < quarter && head < a.heads && column < width)
                    v = __ldcg(reinterpret_cast<const float2*>(
                        a.q + (static_cast<long long>(row) * a.heads + head) * width + column));
                q[m][i][r] = ptx::pack_bf16(v.x, v.y);
            }

    float o[MT][kOutputTiles][4];
    const auto restart = [&]() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int n = 0; n < kOutputTiles; ++n)
                for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
            if (lane < 2) state[m * 16 + 2 * warp + lane] = make_float2(-INFINITY, 0.0f);
        }
        __syncwarp();
    };
    restart();

    // This split's sums and state, for the merge.
    const auto finish_split = [&](int split) {
        const long long row_at = static_cast<long long>(blockIdx.z) * a.heads;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int head = head0 + m * 16 + g + r * 8;
                if (head >= a.heads) continue;
                float* const to = a.part + ((row_at + head) * a.parts + split) * latent;
#pragma unroll
                for (int n = 0; n < kOutputTiles; ++n) {
                    const int column = (warp * kOutputTiles + n) * 8 + 2 * t;
                    if (column < latent)
                        *reinterpret_cast<float2*>(to + column) =
                            make_float2(o[m][n][2 * r], o[m][n][2 * r + 1]);
                }
            }
            const int head = head0 + m * 16 + 2 * warp + lane;
            if (lane < 2 && head < a.heads)
                a.state[(row_at + head) * a.parts + split] = state[m * 16 + 2 * warp + lane];
        }
        __syncwarp();
        restart();
    };

    int split = splits.x;
    for (int chunk = chunk0; chunk < chunk1; ++chunk) {
        const unsigned char* next_address = nullptr;
        if (chunk + 1 < chunk1 && thread < kChunkSize) next_address = key_address(chunk + 1);

        // scores: this warp's quarter of the columns, 16 keys of each half
        float s[MT][4][4];
#pragma unroll
        for (int m = 0; m < MT; ++m)
            for (int n = 0; n < 4; ++n)
                for (int i = 0; i < 4; ++i) s[m][n][i] = 0.0f;
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
            if (stage == 0)
                ptx::copy_async_wait<1>();
            else
                ptx::copy_async_wait<0>();
            __syncthreads();
            const int key = stage * kStageKeys + nh * 16 + lane / 16 * 8 + lane % 8;
            const uint32_t key_at = keys_at + key * row_bytes;
#pragma unroll
            for (int i = 0; i < kScoreSteps; ++i) {
                const int step = kq * quarter + i;
                if (i >= quarter || step >= all_steps) break;
                uint32_t b[4];
                ptx::ldmatrix_x4(b, key_at + (((step * 2 + lane / 8 % 2) ^ (key & 7)) << 4));
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    ptx::mma_bf16(s[m][2 * stage], q[m][i][0], q[m][i][1], q[m][i][2], q[m][i][3], b[0],
                                  b[1]);
                    ptx::mma_bf16(s[m][2 * stage + 1], q[m][i][0], q[m][i][1], q[m][i][2], q[m][i][3], b[2],
                                  b[3]);
                }
            }
        }
        if (thread < kChunkSize) address[((chunk + 1) & 1) * kChunkSize + thread] = next_address;

        // softmax: one tile of 16 heads at a time, two heads a warp, four keys a lane
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if (m > 0) __syncthreads();
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const int key = n / 2 * kStageKeys + nh * 16 + n % 2 * 8 + 2 * t;
                for (int r = 0; r < 2; ++r)
                    *reinterpret_cast<float2*>(exchange + (kq * 16 + g + r * 8) * kExchangeStride + key) =
                        make_float2(s[m][n][2 * r], s[m][n][2 * r + 1]);
            }
            __syncthreads();
            const int head = 2 * warp + lane / 16, tile_row = m * 16 + head, key = lane % 16 * 4;
            const float* const scores = exchange + head * kExchangeStride + key;
            float x[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float4 v = *reinterpret_cast<const float4*>(scores + k * 16 * kExchangeStride);
                x[0] = k == 0 ? v.x : x[0] + v.x;
                x[1] = k == 0 ? v.y : x[1] + v.y;
                x[2] = k == 0 ? v.z : x[2] + v.z;
                x[3] = k == 0 ? v.w : x[3] + v.w;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
                x[j] = chunk * kChunkSize + key + j < span.count ? x[j] * a.scale_log2 : -INFINITY;
            const float2 old = state[tile_row];
            const float now = fmaxf(old.x, half_warp_max(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3]))));
            const uint2 p =
                make_uint2(ptx::pack_bf16(ptx::exp2_approx(x[0] - now), ptx::exp2_approx(x[1] - now)),
                           ptx::pack_bf16(ptx::exp2_approx(x[2] - now), ptx::exp2_approx(x[3] - now)));
            const float2 first = widen_bf16x2(p.x), second = widen_bf16x2(p.y);
            const float shrink = ptx::exp2_approx(old.x - now);
            const float sum = fmaf(old.y, shrink, half_warp_sum((first.x + first.y) + (second.x + second.y)));
            *reinterpret_cast<uint2*>(p_tile + tile_row * 128 + ((lane % 16 / 2 ^ (tile_row & 7)) << 4) +
                                      lane % 2 * 8) = p;
            __syncwarp();  // every lane has read the old state
            if (lane % 16 == 0) {
                factor[tile_row] = shrink;
                state[tile_row] = make_float2(now, sum);
            }
        }
        __syncthreads();

        // output: this warp's 64 columns
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            const float shrink[2] = {factor[m * 16 + g], factor[m * 16 + g + 8]};
#pragma unroll
            for (int n = 0; n < kOutputTiles; ++n)
                for (int i = 0; i < 4; ++i) o[m][n][i] *= shrink[i / 2];
        }
#pragma unroll
        for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
            for (int half = 0; half < kStageKeys / 16; ++half) {
                const int step = stage * (kStageKeys / 16) + half;
                uint32_t p[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    const int tile_row = m * 16 + lane / 8 % 2 * 8 + lane % 8;
                    ptx::ldmatrix_x4(
                        p[m], p_at + tile_row * 128 + (((step * 2 + lane / 16) ^ (tile_row & 7)) << 4));
                }
                const int key = step * 16 + lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
                for (int n = 0; n < kOutputTiles; n += 2) {
                    const int tile = warp * kOutputTiles + n;
                    if (tile * 8 >= latent) break;
                    uint32_t v[4];
                    ptx::ldmatrix_x4_transposed(
                        v, keys_at + key * row_bytes + (((tile + lane / 16) ^ (key & 7)) << 4));
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        ptx::mma_bf16(o[m][n], p[m][0], p[m][1], p[m][2], p[m][3], v[0], v[1]);
                        ptx::mma_bf16(o[m][n + 1], p[m][0], p[m][1], p[m][2], p[m][3], v[2], v[3]);
                    }
                }
            }
            __syncthreads();
            if (chunk + 1 < chunk1) load_stage(chunk + 1, stage);
        }

        if (chunk + 1 == chunk1 || (chunk + 1) * kChunkSize == split_start(split + 1)) {
            finish_split(split);
            ++split;
        }
    }
}

template <int MT, class Shape>
void launch_as(const GemmLaunch& l, const AttentionArgs& args) {
    const int shared = kChunkSize * key_row_bytes(args.latent + args.rope) + kExchangeBytes + MT * 16 * 128 +
                       MT * 16 * 4 + MT * 16 * 8 + 2 * kChunkSize * 8;
    launch<attend<MT, Shape>>(
        {l.stream, l.device, l.name,
         dim3(args.blocks, (args.heads + MT * 16 - 1) / (MT * 16), args.rows.count), kThreads, shared},
        args);
}

}  // namespace

void launch_attend_bf16(const GemmLaunch& l, const AttentionArgs& args) {
    if (args.latent != 512 || args.rope != 64) return launch_as<1, AnyShape>(l, args);
    // A single row has few blocks: 16 heads each make more of them.
    const bool few_blocks = args.rows.count == 1 && args.parts * ((args.heads + 15) / 16) <= 2 * l.sms;
    if (args.heads > 16 && !few_blocks) return launch_as<2, ReleasedShape>(l, args);
    launch_as<1, ReleasedShape>(l, args);
}

}  // namespace kdt::cuda
