// Attention's last step, of both precisions: the splits of a row and head become its output.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kClasses = 4, kLanes = 64;  // a lane has one vector of columns
constexpr int kThreads = kClasses * kLanes;
constexpr int kAhead = 6;  // splits of a class whose sums are on their way at a time

template <int kVector>
struct Vector {
    float v[kVector];
};
template <int kVector>
__device__ __forceinline__ Vector<kVector> load_sums(const float* from) {
    Vector<kVector> sums;
    if constexpr (kVector == 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
        sums = {four.x, four.y, four.z, four.w};
    } else {
        sums.v[0] = __ldcg(from);
    }
    return sums;
}

// Of one row and head: M = the greatest of the splits' maxima; o = the sum of w o_s with w = 2^(m_s - M), and
// l = the sum of 2^(m - M) l of the split's two sums, even steps first; each as four sums (s mod 4) in
// ascending order by fma, which are added as (0 + 1) + (2 + 3); then o / l.
template <int kVector>
__global__ void __launch_bounds__(kThreads) merge(const AttentionArgs a) {
    ptx::grid_launch_next();
    float* const partial = reinterpret_cast<float*>(ptx::shared_memory());  // [class][vector + 1][lane]
    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    const int thread = static_cast<int>(threadIdx.x), group = thread / kLanes, lane = thread % kLanes;
    const int row = a.rows.first + static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
    const int column = (static_cast<int>(blockIdx.x) * kLanes + lane) * kVector;
    const int keys = key_span(a.batch, row).count, splits = keys > 0 ? split_of(keys - 1) + 1 : 0;
    const long long base = (static_cast<long long>(blockIdx.z) * a.heads + head) * a.parts;
    static_assert(kStateSets == 2);
    const float4* const state = reinterpret_cast<const float4*>(a.state) + base;
    const float* const part = a.part + base * a.latent + (column < a.latent ? column : 0);

    float greatest = -INFINITY, l = 0.0f;
    Vector<kVector> o{};
    for (int first = group; first < splits; first += kClasses * kAhead) {
        Vector<kVector> sums[kAhead];
        float4 of[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int s = first + i * kClasses;
            of[i] = make_float4(-INFINITY, 0.0f, -INFINITY, 0.0f);
            if (s >= splits) continue;
            of[i] = __ldcg(state + s);
            sums[i] = load_sums<kVector>(part + static_cast<long long>(s) * a.latent);
        }
        if (first == group) {  // while the first sums travel
            for (int s = thread % 32; s < splits; s += 32) {
                const float4 both = __ldcg(state + s);
                greatest = fmaxf(greatest, fmaxf(both.x, both.z));
            }
            greatest = warp_max(greatest);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            if (first + i * kClasses >= splits) continue;
            const float w = ptx::exp2_approx(fmaxf(of[i].x, of[i].z) - greatest);
            l = fmaf(ptx::exp2_approx(of[i].x - greatest), of[i].y, l);
            l = fmaf(ptx::exp2_approx(of[i].z - greatest), of[i].w, l);
#pragma unroll
            for (int c = 0; c < kVector; ++c) o.v[c] = fmaf(w, sums[i].v[c], o.v[c]);
        }
    }

    const auto place = [&](int g, int c) { return partial + (g * (kVector + 1) + c) * kLanes + lane; };
#pragma unroll
    for (int c = 0; c < kVector; ++c) *place(group, c) = o.v[c];
    *place(group, kVector) = l;
    __syncthreads();
    if (group != 0 || column >= a.latent) return;
    const auto total = [&](int c) { return (*place(0, c) + *place(1, c)) + (*place(2, c) + *place(3, c)); };
    float* const out = a.out + (static_cast<long long>(row) * a.heads + head) * a.latent + column;
    const float denominator = total(kVector);
#pragma unroll
    for (int c = 0; c < kVector; ++c) out[c] = keys > 0 ? total(c) / denominator : 0.0f;
}

template <int kVector>
void launch_as(const GemmLaunch& l, const AttentionArgs& args) {
    constexpr int kColumns = kLanes * kVector;
    launch<merge<kVector>>({l.stream, l.device, l.name,
                            dim3((args.latent + kColumns - 1) / kColumns, args.heads, args.rows.count),
                            kThreads, kClasses * (kVector + 1) * kLanes * 4},
                           args);
}

}  // namespace

void launch_attend_merge(const GemmLaunch& l, const AttentionArgs& args) {
    if (args.latent % 4 == 0) return launch_as<4>(l, args);
    launch_as<1>(l, args);
}

}  // namespace kdt::cuda
