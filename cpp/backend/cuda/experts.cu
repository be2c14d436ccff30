#include "backend/cuda/experts.h"

#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kGroupThreads = 1024;

__global__ void __launch_bounds__(kGroupThreads)
    group_pairs(RowSpan rows, int top_k, int experts, const int32_t* expert, PairLists lists) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    int32_t* const count = reinterpret_cast<int32_t*>(ptx::shared_memory());  // [experts]
    int32_t* const start = count + experts;                                   // [experts]
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int pairs = rows.live_count() * top_k;
    const int32_t* mine = expert + static_cast<long long>(rows.first) * top_k;
    for (int e = thread; e < experts; e += kGroupThreads) count[e] = 0;
    __syncthreads();
    for (int p = thread; p < pairs; p += kGroupThreads) atomicAdd(count + __ldcg(mine + p), 1);
    __syncthreads();
    if (warp == 0) {
        int before = 0, active = 0;
        for (int base = 0; base < experts; base += 32) {
            const int e = base + lane, n = e < experts ? count[e] : 0;
            int sum = n;
            for (int offset = 1; offset < 32; offset <<= 1) {
                const int lower = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
                if (lane >= offset) sum += lower;
            }
            const uint32_t used = __ballot_sync(0xFFFFFFFFu, n > 0);
            if (e < experts) {
                start[e] = before + sum - n;
                lists.offset[e] = before + sum - n;
                if (n > 0) lists.active[active + __popc(used & ((1u << lane) - 1u))] = e;
            }
            before += __shfl_sync(0xFFFFFFFFu, sum, 31);
            active += __popc(used);
        }
        if (lane == 0) {
            lists.offset[experts] = before;
            *lists.active_count = active;
        }
    }
    __syncthreads();
    for (int e = warp; e < experts; e += kGroupThreads / 32) {
        if (count[e] == 0) continue;
        int at = start[e];
        for (int base = 0; base < pairs; base += 32) {
            const int p = base + lane;
            const bool hit = p < pairs && __ldcg(mine + p) == e;
            const uint32_t hits = __ballot_sync(0xFFFFFFFFu, hit);
            if (hit) lists.pairs[at + __popc(hits & ((1u << lane) - 1u))] = p;
            at += __popc(hits);
        }
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
    launch<group_pairs>({l.stream, l.device, l.name, dim3(1), kGroupThreads, experts * 8}, rows, top_k,
                        experts, expert, lists);
}

void launch_combine(const GemmLaunch& l, const CombineArgs& args) {
    launch<combine>({l.stream, l.device, l.name,
                     dim3(static_cast<unsigned>(args.rows.count),
                          static_cast<unsigned>((args.hidden + kCombineThreads - 1) / kCombineThreads)),
                     kCombineThreads},
                    args);
}

}  // namespace kdt::cuda
