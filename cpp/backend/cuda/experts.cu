#include "backend/cuda/experts.h"

#include <algorithm>

#include "backend/cuda/launch.h"
#include "backend/cuda/router.h"

namespace kdt::cuda {

namespace {

// One block sorts the pairs of a slice by expert, stably: counts, where each expert starts, then the place of
// every pair among its expert's from bitmasks over the pairs, `words` * 32 of them at a time.
constexpr int kGroupThreads = 1024;
constexpr int kMaskInts = 20000;  // of shared memory for the bitmasks
static_assert(kMaxExperts <= kGroupThreads);

__device__ __forceinline__ int warp_prefix(int x, int lane) {  // inclusive
    for (int offset = 1; offset < 32; offset <<= 1) {
        const int lower = __shfl_up_sync(0xFFFFFFFFu, x, offset);
        if (lane >= offset) x += lower;
    }
    return x;
}

__global__ void __launch_bounds__(kGroupThreads)
    group_pairs(RowSpan rows, int top_k, int experts, const int32_t* expert, PairLists lists, int words) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int stride = words | 1, chunk = words * 32;  // odd: experts lie in different banks
    int32_t* const start = reinterpret_cast<int32_t*>(ptx::shared_memory());  // [experts] counts, then places
    int32_t* const sums = start + experts;                                    // [2][32] of warps
    int32_t* const mask = sums + 64;                                          // [experts][stride]
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int32_t* const mine = expert + static_cast<long long>(rows.first) * top_k;
    int id = thread < rows.count * top_k ? __ldcg(mine + thread) : 0;  // no expert if its row is padding
    const int pairs = rows.live_count() * top_k;
    if (thread < experts) start[thread] = 0;
    for (int i = thread; i < experts * stride; i += kGroupThreads) mask[i] = 0;
    __syncthreads();
    if (thread < pairs) atomicAdd(start + id, 1);
    for (int p = thread + kGroupThreads; p < pairs; p += kGroupThreads)
        atomicAdd(start + __ldcg(mine + p), 1);
    __syncthreads();

    const int n = thread < experts ? start[thread] : 0;
    const int upto = warp_prefix(n, lane);
    const uint32_t used = __ballot_sync(0xFFFFFFFFu, n > 0);
    if (lane == 31) sums[warp] = upto;
    if (lane == 0) sums[32 + warp] = __popc(used);
    __syncthreads();
    if (warp == 0) {
        const int pairs_of = sums[lane], active_of = sums[32 + lane];
        sums[lane] = warp_prefix(pairs_of, lane) - pairs_of;
        sums[32 + lane] = warp_prefix(active_of, lane) - active_of;
    }
    __syncthreads();
    const int before = sums[warp] + upto - n, active = sums[32 + warp] + __popc(used & ((1u << lane) - 1u));
    if (thread < experts) {
        start[thread] = before;
        lists.offset[thread] = before;
        if (n > 0) lists.active[active] = thread;
    }
    if (thread == kGroupThreads - 1) {
        lists.offset[experts] = before + n;
        *lists.active_count = active + (n > 0);
    }
    __syncthreads();

    for (int first = 0; first < pairs; first += chunk) {
        const int p = first + thread, word = thread / 32;
        const bool in = thread < chunk && p < pairs;
        if (first > 0 && in) id = __ldcg(mine + p);
        int32_t* const bits = mask + (in ? id : 0) * stride;
        if (in) atomicOr(bits + word, static_cast<int32_t>(1u << lane));
        __syncthreads();
        if (in) {
            int at = start[id] + __popc(static_cast<uint32_t>(bits[word]) & ((1u << lane) - 1u));
            for (int w = 0; w < word; ++w) at += __popc(static_cast<uint32_t>(bits[w]));
            lists.pairs[at] = p;
        }
        if (first + chunk >= pairs) break;
        __syncthreads();
        if (thread < experts) {
            int done = 0;
            for (int w = 0; w < words; ++w) {
                done += __popc(static_cast<uint32_t>(mask[thread * stride + w]));
                mask[thread * stride + w] = 0;
            }
            start[thread] += done;
        }
        __syncthreads();
    }
}

constexpr int kCombineThreads = 256;

__global__ void __launch_bounds__(kCombineThreads) combine(const CombineArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    if (static_cast<int>(blockIdx.x) >= a.rows.live_count()) return;
    const int c = static_cast<int>(blockIdx.y) * kCombineThreads + static_cast<int>(threadIdx.x);
    if (c >= a.hidden) return;
    const long long row = a.rows.first + static_cast<int>(blockIdx.x);
    const float* down = a.down + static_cast<long long>(blockIdx.x) * a.top_k * a.hidden + c;
    float sum = 0.0f;
#pragma unroll 4
    for (int slot = 0; slot < a.top_k; ++slot)
        sum = fmaf(__ldcg(a.weight + row * a.top_k + slot),
                   __ldcg(down + static_cast<long long>(slot) * a.hidden), sum);
    if (a.shared != nullptr) sum += __ldcg(a.shared + row * a.hidden + c);
    float* y = a.y + row * a.hidden + c;
    *y = __ldcg(y) + sum;
}

}  // namespace

void launch_group_pairs(const GemmLaunch& l, RowSpan rows, int top_k, int experts, const int32_t* expert,
                        const PairLists& lists) {
    int words = std::clamp((rows.count * top_k + 31) / 32, 1, kGroupThreads / 32);
    while (words > 1 && (words | 1) * experts > kMaskInts) words /= 2;
    launch<group_pairs>({l.stream, l.device, l.name, dim3(1), kGroupThreads,
                         (experts + 64 + experts * (words | 1)) * static_cast<int>(sizeof(int32_t))},
                        rows, top_k, experts, expert, lists, words);
}

void launch_combine(const GemmLaunch& l, const CombineArgs& args) {
    launch<combine>({l.stream, l.device, l.name,
                     dim3(static_cast<unsigned>(args.rows.count),
                          static_cast<unsigned>((args.hidden + kCombineThreads - 1) / kCombineThreads)),
                     kCombineThreads},
                    args);
}

}  // namespace kdt::cuda
