// From a proposal in global memory to what the popping warp reads: each table row's usable ranks as float64
// cells, no token twice; each path's usable steps. A row or a path ends before its first entry that is no
// log-probability, no token of the vocabulary or (in a row) likelier than the entry before it.
#pragma once

#include "backend/cuda/build_tree.cuh"

namespace kdt::cuda::tree_build {

__device__ __forceinline__ bool is_log_probability(float x) {
    return x <= 0.0f && x > -INFINITY;
}

// Row d as the table has it, a token twice or not: rank r is cell r. One warp.
__device__ __forceinline__ void prepare_row(Shared& sm, int d, int width, int vocab,
                                            const int32_t (&token)[2], const float (&logp)[2], int lane) {
    // the entry before the first of the upper half stands in lane 31 of the lower
    const float before0 = __shfl_up_sync(kAll, logp[0], 1), last = __shfl_sync(kAll, logp[0], 31);
    const float up = __shfl_up_sync(kAll, logp[1], 1), before1 = lane == 0 ? last : up;
    const auto ok = [&](int r, int32_t t, float x, float before) {
        return r < width && t >= 0 && t < vocab && is_log_probability(x) && (r == 0 || x <= before);
    };
    const uint32_t bad0 = ~__ballot_sync(kAll, ok(lane, token[0], logp[0], before0));
    const uint32_t bad1 = ~__ballot_sync(kAll, ok(lane + 32, token[1], logp[1], before1));
    // the usable ranks are those before the first one that is not
    const int low = __ffs(static_cast<int>(bad0)), upper = __ffs(static_cast<int>(bad1));
    const int usable = low > 0 ? low - 1 : upper > 0 ? upper + 31 : 64;
    int32_t* const row = sm.cell_token + d * kRow;
    double* const cell = sm.cell + d * kRow;
    row[lane] = token[0];
    row[lane + 32] = token[1];
    cell[lane] = lane < usable ? static_cast<double>(fabsf(logp[0])) : infinity();
    cell[lane + 32] = lane + 32 < usable ? static_cast<double>(fabsf(logp[1])) : infinity();
    if (lane < kRow - 64) cell[lane + 64] = infinity();
    if (lane == 0) sm.width[d] = usable;
}

// Which entries of row d are the first with their token: bit l of `first[s]` is entry l + 32 s. One warp.
__device__ __forceinline__ void first_entries(const Shared& sm, int d, int lane, uint32_t (&first)[2]) {
    const int32_t* const row = sm.cell_token + d * kRow;
    const int width = sm.width[d];
    const int32_t token0 = row[lane], token1 = row[lane + 32];
    uint32_t low0 = 0, low1 = 0, upper1 = 0;  // entries with the token of entry `lane`, of `lane` + 32
    for (int i = 0; i < width; i += 16)
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            const int4 t = *reinterpret_cast<const int4*>(row + i + j);
            const int32_t each[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const uint32_t bit = 1u << ((i + j + k) % 32);
                if (i < 32) {
                    if (each[k] == token0) low0 |= bit;
                    if (each[k] == token1) low1 |= bit;
                } else {
                    if (each[k] == token1) upper1 |= bit;
                }
            }
        }
    const uint32_t below = (1u << lane) - 1u;
    first[0] = __ballot_sync(kAll, lane < width && (low0 & below) == 0);
    first[1] = __ballot_sync(kAll, lane + 32 < width && low1 == 0 && (upper1 & below) == 0);
}

__device__ __forceinline__ bool row_repeats(const Shared& sm, int d, int lane) {
    uint32_t first[2];
    first_entries(sm, d, lane, first);
    return __popc(first[0]) + __popc(first[1]) < sm.width[d];
}

// Closes the gaps that second and later entries of a token leave in row d. One warp.
__device__ __forceinline__ void pack_row(Shared& sm, int d, int lane) {
    uint32_t first[2];
    first_entries(sm, d, lane, first);
    int32_t* const row = sm.cell_token + d * kRow;
    double* const cell = sm.cell + d * kRow;
    const int32_t token[2] = {row[lane], row[lane + 32]};
    const double magnitude[2] = {cell[lane], cell[lane + 32]};
    __syncwarp();  // every lane has read the row: it may take its entries in their final places
    cell[lane] = cell[lane + 32] = infinity();
    __syncwarp();
#pragma unroll
    for (int s = 0; s < 2; ++s)
        if (first[s] >> lane & 1) {
            const int at = (s == 0 ? 0 : __popc(first[0])) + __popc(first[s] & ((1u << lane) - 1u));
            row[at] = token[s];
            cell[at] = magnitude[s];
        }
    if (lane == 0) sm.width[d] = __popc(first[0]) + __popc(first[1]);
}

// Path q: its usable length, and its steps in shared memory. One warp.
__device__ __forceinline__ void prepare_path(Shared& sm, const BuildTreeArgs& a, int q, float* weight,
                                             int32_t* token, int lane) {
    const int length = min(__ldcg(a.proposal.path_length + q), kMaxDepth);
    uint32_t ok[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int step = lane + 32 * half, at = q * kMaxDepth + step;
        const float x = step < length ? __ldcg(a.proposal.path_logp + at) : 1.0f;
        const int32_t t = step < length ? __ldcg(a.proposal.path_token + at) : -1;
        weight[at] = fabsf(x);
        token[at] = t;
        ok[half] = __ballot_sync(kAll, is_log_probability(x) && t >= 0 && t < a.vocab);
    }
    const int low = ok[0] == kAll ? 32 : __ffs(static_cast<int>(~ok[0])) - 1;
    const int upper = ok[1] == kAll ? 32 : __ffs(static_cast<int>(~ok[1])) - 1;
    if (lane == 0) sm.path_length[q] = low < 32 ? low : 32 + upper;
}

}  // namespace kdt::cuda::tree_build
