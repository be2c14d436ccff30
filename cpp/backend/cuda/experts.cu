#include "backend/cuda/experts.h"

#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

// Greatest value over the warp, ties to the lower id; id -1 takes no part.
__device__ __forceinline__ void warp_best(float& value, int& id) {
    for (int offset = 16; offset > 0; offset >>= 1) {
        const float other = __shfl_xor_sync(0xFFFFFFFFu, value, offset);
        const int other_id = __shfl_xor_sync(0xFFFFFFFFu, id, offset);
        if (other_id >= 0 && (id < 0 || other > value || (other == value && other_id < id))) {
            value = other;
            id = other_id;
        }
    }
}

// One warp a row. NaN counts as -infinity, so that any input gives top_k different experts.
__global__ void __launch_bounds__(32) route(const RouteArgs a, const float* logits, int experts) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
    if (row >= live_rows(a.rows)) return;
    float* const score = reinterpret_cast<float*>(ptx::shared_memory());
    float* const choice = score + experts;
    float* const group_score = choice + experts;  // [groups]; -infinity once out of the race
    const float* x = logits + static_cast<long long>(row) * experts;

    if (a.scoring == Scoring::sigmoid_noaux_tc) {
        for (int e = lane; e < experts; e += 32) {
            score[e] = 1.0f / (1.0f + expf(-load_activation(x + e)));
            choice[e] = score[e] + a.bias[e];
        }
    } else {
        float greatest = -INFINITY;
        for (int e = lane; e < experts; e += 32) greatest = fmaxf(greatest, load_activation(x + e));
        greatest = warp_max(greatest);
        float sum = 0.0f;
        for (int e = lane; e < experts; e += 32) {
            score[e] = expf(load_activation(x + e) - greatest);
            sum += score[e];
        }
        sum = warp_sum(sum);
        for (int e = lane; e < experts; e += 32) choice[e] = score[e] = score[e] / sum;
    }
    for (int e = lane; e < experts; e += 32)
        if (!(choice[e] == choice[e])) choice[e] = -INFINITY;
    __syncwarp();

    const int per_group = experts / a.groups;
    if (a.groups > 1) {
        for (int g = lane; g < a.groups; g += 32) {
            float best = -INFINITY, second = -INFINITY;
            for (int e = g * per_group; e < (g + 1) * per_group; ++e) {
                const float v = choice[e];
                if (v > best) {
                    second = best;
                    best = v;
                } else if (v > second) {
                    second = v;
                }
            }
            group_score[g] = a.scoring == Scoring::softmax_greedy || per_group == 1 ? best : best + second;
        }
        __syncwarp();
        // `kept` marks the top groups in the lanes that own them: bit j for group lane + 32 j
        uint32_t kept = 0;
        for (int n = 0; n < a.top_groups; ++n) {
            float value = -INFINITY;
            int id = -1;
            for (int g = lane, j = 0; g < a.groups; g += 32, ++j)
                if ((kept >> j & 1) == 0 && (id < 0 || group_score[g] > value)) {
                    value = group_score[g];
                    id = g;
                }
            warp_best(value, id);
            if (id >= 0 && id % 32 == lane) kept |= 1u << (id / 32);
        }
        __syncwarp();
        for (int g = lane, j = 0; g < a.groups; g += 32, ++j) group_score[g] = kept >> j & 1 ? 1.0f : 0.0f;
        __syncwarp();
    }

    uint32_t taken = 0;  // bit j for expert lane + 32 j
    float mine = 0.0f;   // weight of slot `lane`
    int mine_id = 0;
    for (int slot = 0; slot < a.top_k; ++slot) {
        float value = -INFINITY;
        int id = -1;
        for (int e = lane, j = 0; e < experts; e += 32, ++j) {
            if (taken >> j & 1) continue;
            if (a.groups > 1 && group_score[e / per_group] == 0.0f) continue;
            if (id < 0 || choice[e] > value) {
                value = choice[e];
                id = e;
            }
        }
        warp_best(value, id);
        if (id < 0) id = 0;  // fewer candidates than slots; refused by the host
        if (id % 32 == lane) taken |= 1u << (id / 32);
        if (slot == lane) {
            mine = score[id];
            mine_id = id;
        }
    }
    if (a.normalize) {
        float sum = 0.0f;
        for (int slot = 0; slot < a.top_k; ++slot) sum += __shfl_sync(0xFFFFFFFFu, mine, slot);
        mine = mine / (sum + 1e-20f);
    }
    mine *= a.scaling;
    if (lane < a.top_k) {
        a.expert[static_cast<long long>(row) * a.top_k + lane] = mine_id;
        a.weight[static_cast<long long>(row) * a.top_k + lane] = mine;
    }
}

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

void launch_route(const GemmLaunch& l, const RouteArgs& args, const float* logits) {
    const int experts = args.gate.out;
    launch<route>({l.stream, l.device, l.name, dim3(static_cast<unsigned>(args.rows.capacity)), 32,
                   (2 * experts + args.groups) * 4},
                  args, logits, experts);
}

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
