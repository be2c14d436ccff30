// Attention of a draft block in float32, for exactness and for heads that the tensor cores do not take, over
// a cache of either type; and the merge of its splits, which both precisions share.
//
// One row, one query head, one split of the positions a thread block:
//
//   split's keys  [64][64][64][64]   a chunk: scores (a warp a key) -> softmax (warp 0) -> output (a thread a
//                                    column, keys ascending)
//   merge         row's splits, from that of its first key to that of its last, folded in order -> o / l
#include "backend/cuda/attention.cuh"
#include "backend/cuda/draft.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMergeThreads = 128;
constexpr int kMaxColumns = 4;       // of a head, a thread
constexpr int kBlocksWanted = 4096;  // thread blocks of one launch, about; fixes no bit
static_assert(kMaxColumns * kThreads == kMaxHeadDim);

template <bool Bf16>
__device__ __forceinline__ float load(const unsigned char* row, int column) {
    return Bf16 ? widen_bf16(__ldcg(reinterpret_cast<const uint16_t*>(row) + column))
                : load_activation(reinterpret_cast<const float*>(row) + column);
}

// Scores: a warp a key, lane l takes columns l, l + 32, ... ascending by fma, then the warp's tree.
template <bool Bf16>
__global__ void __launch_bounds__(kThreads, 1) block_attend_fma(const BlockAttentionArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int row = a.rows.first + static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
    const int width = a.head_dim, element = Bf16 ? 2 : 4;
    const int entry_bytes = 2 * a.kv_heads * width * element;
    const int key_at = head / (a.heads / a.kv_heads) * width * element;
    const int value_at = key_at + a.kv_heads * width * element;
    const int sequence = __ldcg(a.sequence), start = __ldcg(a.start);
    const BlockSpan span = block_span(a, start, row);
    if (span.last < span.first) return;

    const unsigned char** const address = reinterpret_cast<const unsigned char**>(ptx::shared_memory());
    float* const p = reinterpret_cast<float*>(address + kChunkSize);
    float* const factor = p + kChunkSize;  // [2]
    float* const q = factor + 2;           // [width]
    for (int c = thread; c < width; c += kThreads)
        q[c] = load_activation(a.q + (static_cast<long long>(row) * a.heads + head) * width + c);

    const int first_split = a.splits.of(span.first), last_split = a.splits.of(span.last);
    for (int split = first_split + static_cast<int>(blockIdx.x); split <= last_split;
         split += static_cast<int>(gridDim.x)) {
        float o[kMaxColumns] = {}, m = -INFINITY, l = 0.0f;
        const int chunk0 = max(a.splits.start(split), span.first) / kChunkSize;
        const int chunk1 = min(a.splits.start(split + 1) - 1, span.last) / kChunkSize;
        for (int chunk = chunk0; chunk <= chunk1; ++chunk) {
            const int low = max(0, span.first - chunk * kChunkSize);
            const int high = min(kChunkSize - 1, span.last - chunk * kChunkSize);
            __syncthreads();
            if (thread < kChunkSize)
                address[thread] = draft_entry(a, sequence, start, chunk * kChunkSize + thread, entry_bytes);
            __syncthreads();
            for (int key = low + warp; key <= high; key += kThreads / 32) {
                const unsigned char* const entry = address[key];
                float s = 0.0f;
                if (entry != nullptr)
                    for (int c = lane; c < width; c += 32) s = fmaf(q[c], load<Bf16>(entry + key_at, c), s);
                s = warp_sum(s);
                if (lane == 0) p[key] = s * a.scale_log2;
            }
            __syncthreads();
            if (warp == 0) {
                const float x0 = lane >= low && lane <= high ? p[lane] : -INFINITY;
                const float x1 = lane + 32 >= low && lane + 32 <= high ? p[lane + 32] : -INFINITY;
                const float now = fmaxf(m, warp_max(fmaxf(x0, x1)));
                const float p0 = ptx::exp2_approx(x0 - now), p1 = ptx::exp2_approx(x1 - now);
                const float shrink = ptx::exp2_approx(m - now);
                p[lane] = p0;
                p[lane + 32] = p1;
                l = fmaf(l, shrink, warp_sum(p0 + p1));
                m = now;
                if (lane == 0) factor[0] = shrink;
            }
            __syncthreads();
            for (int i = 0; i < kMaxColumns; ++i) {
                const int c = thread + i * kThreads;
                if (c >= width) break;
                o[i] *= factor[0];
                for (int key = low; key <= high; ++key)
                    if (address[key] != nullptr)
                        o[i] = fmaf(p[key], load<Bf16>(address[key] + value_at, c), o[i]);
            }
        }
        const long long at =
            (static_cast<long long>(blockIdx.z) * a.heads + head) * a.parts + split - first_split;
        for (int i = 0; i < kMaxColumns; ++i)
            if (thread + i * kThreads < width) a.part[at * width + thread + i * kThreads] = o[i];
        if (thread == 0) a.state[at] = make_float2(m, l);
    }
}

__global__ void __launch_bounds__(kMergeThreads) block_merge(const BlockAttentionArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    const int row = a.rows.first + static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
    const int column = static_cast<int>(blockIdx.x) * kMergeThreads + static_cast<int>(threadIdx.x);
    if (column >= a.head_dim) return;
    const BlockSpan span = block_span(a, __ldcg(a.start), row);
    float* const out = a.out + (static_cast<long long>(row) * a.heads + head) * a.head_dim + column;
    if (span.last < span.first) {  // a row that sees no key
        *out = 0.0f;
        return;
    }
    const long long base = (static_cast<long long>(blockIdx.z) * a.heads + head) * a.parts;
    const float* const part = a.part + base * a.head_dim + column;
    const float2* const state = a.state + base;
    const int count = a.splits.of(span.last) - a.splits.of(span.first) + 1;
    float sum = __ldcg(part);
    float2 sum_state = __ldcg(state);
#pragma unroll 8
    for (int i = 1; i < count; ++i) {
        const float2 next = __ldcg(state + i);
        const float value = __ldcg(part + static_cast<long long>(i) * a.head_dim);
        const Fold f = fold(sum_state.x, next.x);
        sum = folded(f, sum, value);
        sum_state = make_float2(f.maximum, folded(f, sum_state.y, next.y));
    }
    *out = sum / sum_state.y;
}

template <bool Bf16>
void launch_as(const GemmLaunch& l, const BlockAttentionArgs& args) {
    const int splits = std::clamp(kBlocksWanted / (args.heads * args.rows.count), 1, args.parts);
    const int shared = kChunkSize * 8 + (kChunkSize + 2 + args.head_dim) * 4;
    launch<block_attend_fma<Bf16>>({l.stream, l.device, l.name,
                                    dim3(static_cast<unsigned>(splits), static_cast<unsigned>(args.heads),
                                         static_cast<unsigned>(args.rows.count)),
                                    kThreads, shared},
                                   args);
}

}  // namespace

void launch_block_attend_fma(const GemmLaunch& l, const BlockAttentionArgs& args, bool bf16_cache) {
    if (bf16_cache)
        launch_as<true>(l, args);
    else
        launch_as<false>(l, args);
}

void launch_block_merge(const GemmLaunch& l, const BlockAttentionArgs& args) {
    launch<block_merge>({l.stream, l.device, l.name,
                         dim3(static_cast<unsigned>((args.head_dim + kMergeThreads - 1) / kMergeThreads),
                              static_cast<unsigned>(args.heads), static_cast<unsigned>(args.rows.count)),
                         kMergeThreads},
                        args);
}

}  // namespace kdt::cuda
