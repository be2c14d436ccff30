// The k greatest tokens of a row, two ways: a list of candidates, sorted in block 0, or the key of the least
// of them, which needs no list.
#pragma once

#include "backend/cuda/sampling.cuh"

namespace kdt::cuda::sampling {

// How far below the greatest logit: eight bins an octave from 2^-24 on, the last for all that is far. A
// greater logit never has a greater bin, and equal logits share one.
__device__ __forceinline__ int bin_of(float x, float greatest) {
    const float distance = x == greatest ? 0.0f : greatest - x;
    const int octave = static_cast<int>(__float_as_uint(distance) >> 20) - (103 << 3) + 1;
    return min(max(octave, 0), kBins - 1);
}

// A bin such that at least `ranks` tokens lie in it or in lower ones, without many more: counted over the
// greatest logit of every thread. kBins: there is none. The same in every block.
__device__ __forceinline__ int bin_of_rank(Team& team, float mine, float greatest, int ranks) {
    Space& space = team.space;
    const int bin = bin_of(mine, greatest);
    if (bin < kBins - 1) atomicAdd(space.bins + bin, 1u);
    ptx::cluster_sync();
    uint32_t* const merged = reinterpret_cast<uint32_t*>(space.list);  // not in use yet
    if (team.thread < kBins) {
        uint32_t sum = 0;
#pragma unroll
        for (uint32_t rank = 0; rank < kBlocks; ++rank)
            sum += ptx::cluster_load_word(space.bins + team.thread, rank);
        merged[team.thread] = sum;
    }
    __syncthreads();
    constexpr int kEach = kBins / 32;
    uint32_t part[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += part[i] = merged[team.lane * kEach + i];
    uint32_t upto = sum;
    for (int offset = 1; offset < 32; offset <<= 1) {
        const uint32_t lower = __shfl_up_sync(kAll, upto, offset);
        if (team.lane >= offset) upto += lower;
    }
    uint32_t found = kBins;
    upto -= sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        upto += part[i];
        if (upto >= static_cast<uint32_t>(ranks) && found == kBins)
            found = static_cast<uint32_t>(team.lane * kEach + i);
    }
    __syncthreads();  // `merged` is read
    return static_cast<int>(__reduce_min_sync(kAll, found));
}

__device__ __forceinline__ void list_candidate(Space& space, uint64_t key) {
    const int at = atomicAdd(&space.count, 1);
    if (at < kCandidates) space.list[at] = key;
}

// Everyone's candidates into block 0, best first. Their number; -1: too many to list. The same in every
// block; ends without a meeting, which must come before anyone leaves or lists again.
__device__ __forceinline__ int collect(Team& team) {
    Space& space = team.space;
    ptx::cluster_sync();
    int each[kBlocks], total = 0;
#pragma unroll
    for (uint32_t rank = 0; rank < kBlocks; ++rank) {
        each[rank] = static_cast<int>(ptx::cluster_load_word(&space.count, rank));
        total += each[rank];
    }
    if (total > kCandidates) return -1;
    if (blockIdx.x != 0) return total;
    for (int i = each[0] + team.thread; i < total; i += kThreads) {  // one trip for all blocks' lists
        int at = i;
        uint32_t rank = 0;
#pragma unroll
        for (uint32_t r = 0; r < kBlocks - 1; ++r)
            if (rank == r && at >= each[r]) {
                at -= each[r];
                rank = r + 1;
            }
        space.list[i] = cluster_load(space.list + at, rank);
    }
    __syncthreads();
    constexpr int kEach = kCandidates / kThreads;
    uint64_t mine[kEach];
    int rank[kEach];
    for (int j = 0; j < kEach; ++j) {
        const int i = team.thread + j * kThreads;
        mine[j] = i < total ? space.list[i] : 0;
        rank[j] = 0;
    }
    const int rounds = (total + kThreads - 1) / kThreads;
#pragma unroll 4
    for (int i = 0; i < total; ++i) {
        const uint64_t other = space.list[i];
#pragma unroll
        for (int j = 0; j < kEach; ++j)
            if (j < rounds) rank[j] += other > mine[j];
    }
    __syncthreads();
    for (int j = 0; j < kEach; ++j)
        if (team.thread + j * kThreads < total) space.list[rank[j]] = mine[j];
    __syncthreads();
    return total;
}

// The greatest key T with (sum of weight(id, x) over tokens with key >= T) >= target; at least one token
// reaches it. Two binary digits at a time.
template <bool Held, class Weight>
__device__ __forceinline__ uint64_t threshold(const Slice<Held>& slice, uint64_t target, Team& team,
                                              const Weight& weight) {
    uint64_t found = 0;
    for (int shift = 62; shift >= 0; shift -= 2) {
        // ids are below 2^20: the bits between are all ones in every key
        if (shift < 32 && shift >= 20) {
            found |= 3ull << shift;
            continue;
        }
        const uint64_t digit = 1ull << shift;
        uint64_t sum[3] = {0, 0, 0};
        slice.for_each([&](int id, float x) {
            const uint64_t key = token_key(x, id);
            const uint64_t w = key >= found + digit ? weight(id, x) : 0;
            sum[0] += w;
            if (key >= found + 2 * digit) sum[1] += w;
            if (key >= found + 3 * digit) sum[2] += w;
        });
        team.join<Sum, 3>(sum);
        for (int i = 0; i < 3; ++i)
            if (sum[i] >= target) found += digit;
    }
    return found;
}

}  // namespace kdt::cuda::sampling
