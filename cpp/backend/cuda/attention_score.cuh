// Score warps of attention_bf16.cu: queries, q . K over the block's columns, the exchange with the partner
// block, and softmax.
#pragma once

#include "backend/cuda/attention_bf16.cuh"

namespace kdt::cuda::bf16_attention {

// The queries of all heads over the block's columns, rounded to bf16 once, into a place for 64 rows of K:
// laid out like keys, zero past the last head and unit.
template <class Shape, int MT>
__device__ __forceinline__ void stage_queries(const AttentionArgs& a, const Part& part, unsigned char* to,
                                              int thread) {
    const Columns c = Shape::columns(a, part.rank);
    constexpr int kQuads = kMostUnits * 2, kTurns = (MT * 16 * kQuads + kThreads<MT> - 1) / kThreads<MT>;
    float4 v[kTurns];
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int n = thread + i * kThreads<MT>, head = n / kQuads, quad = n % kQuads;
        v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (head < min(MT * 16, a.heads - part.head0) && (Shape::kWhole || quad / 2 < c.units()))
            v[i] = load_activation4(
                a.q + (static_cast<long long>(part.row) * a.heads + part.head0 + head) * Shape::width(a) +
                c.column(quad / 2, Shape::latent(a)) + quad % 2 * 4);
    }
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
        const int n = thread + i * kThreads<MT>, head = n / kQuads, quad = n % kQuads;
        if (head < MT * 16)
            *reinterpret_cast<uint2*>(to + head * kKeyBytes + unit_at(quad / 2, head) + quad % 2 * 8) =
                make_uint2(ptx::pack_bf16(v[i].x, v[i].y), ptx::pack_bf16(v[i].z, v[i].w));
    }
}

// Those of 16 heads as A fragments.
struct Queries {
    uint32_t fragment[kMostSteps][4];

    __device__ __forceinline__ void load(uint32_t staged, int lane) {
        const int head = lane % 16;
        const uint32_t at = staged + head * kKeyBytes;
        const uint32_t unit[2] = {at + unit_at(lane / 16, head), at + unit_at(2 + lane / 16, head)};
#pragma unroll
        for (int i = 0; i < kMostSteps; ++i) ptx::ldmatrix_x4(fragment[i], unit[i % 2] + i / 2 * 64);
    }

    // Sums over the block's columns, in one accumulator. K of a step is read while the step before
    // multiplies.
    __device__ __forceinline__ void multiply(uint32_t keys_at, int steps, int lane,
                                             float (&sum)[4][4]) const {
#pragma unroll
        for (int n = 0; n < 4; ++n)
            for (int i = 0; i < 4; ++i) sum[n][i] = 0.0f;
        const int key = lane / 16 * 8 + lane % 8;
        const uint32_t at = keys_at + key * kKeyBytes;
        const uint32_t unit[2] = {at + unit_at(lane / 8 % 2, key), at + unit_at(2 + lane / 8 % 2, key)};
        uint32_t b[2][2][4];
        const auto read = [&](int i) {
#pragma unroll
            for (int n = 0; n < 2; ++n)
                ptx::ldmatrix_x4(b[i % 2][n], unit[i % 2] + n * 16 * kKeyBytes + i / 2 * 64);
        };
        read(0);
#pragma unroll
        for (int i = 0; i < kMostSteps; ++i) {
            if (i >= steps) break;
            if (i + 1 < kMostSteps) read(i + 1);
            const uint32_t (&q)[4] = fragment[i];
#pragma unroll
            for (int n = 0; n < 4; ++n)
                ptx::mma_bf16(sum[n], q[0], q[1], q[2], q[3], b[i % 2][n / 2][n % 2 * 2],
                              b[i % 2][n / 2][n % 2 * 2 + 1]);
        }
    }
};

// Softmax of 16 heads: a lane has heads lane / 4 and lane / 4 + 8, and eight of a step's 32 keys.
struct Softmax {
    float sum[2], of[2];  // of this set's steps and this lane's keys, and the maximum it refers to

    __device__ __forceinline__ void restart() {
        for (int r = 0; r < 2; ++r) {
            of[r] = -INFINITY;
            sum[r] = 0.0f;
        }
    }

    // P of a step from its scores and each head's reference maximum.
    __device__ __forceinline__ void weigh(const float (&x)[4][4], float scale, const float (&maximum)[2],
                                          uint4 (&weight)[2]) {
        uint32_t packed[4][2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float pair[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                packed[n][r] = ptx::pack_bf16(ptx::exp2_approx(fmaf(x[n][2 * r], scale, -maximum[r])),
                                              ptx::exp2_approx(fmaf(x[n][2 * r + 1], scale, -maximum[r])));
                const float2 p = widen_bf16x2(packed[n][r]);
                pair[n] = p.x + p.y;
            }
            const float factor = of[r] == maximum[r] ? 1.0f : ptx::exp2_approx(of[r] - maximum[r]);
            sum[r] = fmaf(sum[r], factor, (pair[0] + pair[1]) + (pair[2] + pair[3]));
            of[r] = maximum[r];
        }
#pragma unroll
        for (int k = 0; k < 2; ++k)
            weight[k] =
                make_uint4(packed[2 * k][0], packed[2 * k][1], packed[2 * k + 1][0], packed[2 * k + 1][1]);
    }
};

// Greatest score of a step for each of a lane's two heads.
__device__ __forceinline__ void step_maximum(const float (&x)[4][4], float (&top)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        top[r] = fmaxf(x[0][2 * r], x[0][2 * r + 1]);
#pragma unroll
        for (int n = 1; n < 4; ++n) top[r] = fmaxf(top[r], fmaxf(x[n][2 * r], x[n][2 * r + 1]));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 1));
        top[r] = fmaxf(top[r], __shfl_xor_sync(0xFFFFFFFFu, top[r], 2));
    }
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, 1);
    return x + __shfl_xor_sync(0xFFFFFFFFu, x, 2);
}

template <class Shape, int MT>
__device__ __forceinline__ void score(const AttentionArgs& a, const Part& part, Shared<MT>& sm, int tile,
                                      int set, int lane) {
    const Columns c = Shape::columns(a, part.rank);
    const uint32_t partner = static_cast<uint32_t>(part.rank ^ 1);
    const int head = tile * 16 + lane / 4;  // and the one 8 further
    Queries q;
    q.load(ptx::shared_address(sm.keys[kFirstStages]) + tile * 16 * kKeyBytes, lane);
    ptx::cluster_sync();
    Softmax softmax;
    softmax.restart();
    const uint32_t met = ptx::shared_address(&sm.met[set][tile]);
    int split = part.split, begin = 0, end = part.split_end(split);
    for (int i = set; i < part.steps; i += kSets) {
        const int turn = i / kSets;
        if (i >= end) {
            begin = end;
            end = part.split_end(++split);
            softmax.restart();
        }
        float x[4][4];
        wait(sm.loaded[i % kStages], i / kStages);
        q.multiply(ptx::shared_address(sm.keys[i % kStages]), c.steps(), lane, x);

        // the partner's sums for this block's
        if (turn > 0) wait(sm.read[set][tile], turn - 1);
        if (lane == 0) ptx::barrier_arrive_expecting(met, kScoreBytes);
#pragma unroll
        for (int n = 0; n < 4; ++n)
            ptx::cluster_store_async(ptx::shared_address(&sm.score[set][tile][n][lane]),
                                     make_float4(x[n][0], x[n][1], x[n][2], x[n][3]), met, partner);
        wait(sm.met[set][tile], turn);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float4 other = sm.score[set][tile][n][lane];
            x[n][0] += other.x;
            x[n][1] += other.y;
            x[n][2] += other.z;
            x[n][3] += other.w;
        }
        __syncwarp();
        if (lane == 0) ptx::barrier_arrive(ptx::shared_address(&sm.read[set][tile]), partner);

        const int first_key = (part.step + i) * kStepKeys;
        if (first_key + kStepKeys > part.span.count) {
#pragma unroll
            for (int n = 0; n < 4; ++n)
                for (int j = 0; j < 4; ++j)
                    if (first_key + n * 8 + lane % 4 * 2 + j % 2 >= part.span.count) x[n][j] = -INFINITY;
        }

        // the maxima that the step before left, and what this one makes of them
        float top[2], maximum[2], factor[2];
        step_maximum(x, top);
        if (i > 0) wait(sm.passed[set ^ 1][tile], (i - 1) / kSets);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float before = i > begin ? sm.maximum[set ^ 1][head + r * 8] : -INFINITY;
            const bool moves = top[r] * a.scale_log2 > before + kSlack;
            maximum[r] = moves ? top[r] * a.scale_log2 : before;
            factor[r] = moves ? ptx::exp2_approx(before - maximum[r]) : 1.0f;
        }
        if (lane % 4 == 0)
            for (int r = 0; r < 2; ++r) sm.maximum[set][head + r * 8] = maximum[r];
        arrive(sm.passed[set][tile]);

        uint4 weight[2];
        softmax.weigh(x, a.scale_log2, maximum, weight);
        const bool rescale = __any_sync(0xFFFFFFFFu, factor[0] != 1.0f || factor[1] != 1.0f);
        if (turn > 0) wait(sm.used[set], turn - 1);
        for (int k = 0; k < 2; ++k) sm.weight[set][tile][k][lane] = weight[k];
        if (lane % 4 == 0)
            for (int r = 0; r < 2; ++r) sm.factor[set][head + r * 8] = factor[r];
        if (lane == 0) sm.rescale[set][tile] = rescale;
        arrive(sm.weighed[set]);

        if (i + kSets >= end) {  // this set's last step of the split; of a split of one step, the other's too
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const float sum = quad_sum(softmax.sum[r]);
                const int h = part.head0 + head + r * 8;
                if (part.rank != 0 || lane % 4 != 0 || h >= a.heads) continue;
                float2* const to =
                    a.state + ((static_cast<long long>(blockIdx.z) * a.heads + h) * a.parts + split) * kSets;
                to[set] = make_float2(maximum[r], sum);
                if (end - begin == 1) to[set ^ 1] = make_float2(-INFINITY, 0.0f);
            }
        }
    }
}

}  // namespace kdt::cuda::bf16_attention
