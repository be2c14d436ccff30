// Popping where there are paths: a candidate of the table or of a path may be a node that stands already, so
// prefixes and nodes are numbered apart.
//
//   lane l     slot[0], slot[1]            candidates of prefixes l and l + 32 (build_tree_frontier.cuh)
//              path_*[0], path_*[1], ...   next steps of paths l, l + 32, ...
//              parent, token [0], [1]      of nodes l and l + 32, among which a node is looked for
//
// `PathSets`: of 32 paths each, 1 or 4.
#pragma once

#include "backend/cuda/build_tree_frontier.cuh"

namespace kdt::cuda::tree_build {

template <int PathSets>
struct MergedFrontier : Frontier<8> {
    const float* step_weight;  // [max_paths, kMaxDepth]
    const int32_t* step_token;
    int owner[2];  // nodes of the slots' prefixes

    // Of path q = lane + 32 k, named 64 + q in keys: its next step, the depth of that and the node before it.
    uint32_t path_key[PathSets];
    double path_weight[PathSets];
    int node[PathSets], depth[PathSets], length[PathSets];

    int parent[2], token[2];  // of nodes lane and lane + 32

    __device__ __forceinline__ MergedFrontier(Shared& shared, int its_lane, const float* weights,
                                              const int32_t* tokens)
        : Frontier<8>(shared, its_lane), step_weight(weights), step_token(tokens) {}

    __device__ __forceinline__ void begin_paths(int paths, int max_depth) {
#pragma unroll
        for (int k = 0; k < PathSets; ++k) {
            const int q = lane + 32 * k;
            length[k] = q < paths ? min(sm.path_length[q], max_depth) : 0;
            path_weight[k] = length[k] > 0 ? static_cast<double>(step_weight[q * kMaxDepth]) : infinity();
            path_key[k] = key(path_weight[k], 64 + q);
            node[k] = 0;
            depth[k] = 1;
        }
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            owner[s] = 0;
            parent[s] = -2;
            token[s] = -1;
        }
    }

    // The slot or path of the heaviest candidate among those that share the upper bits of key `least`; -1:
    // there is no candidate. Of equal ones the table goes before paths, then the lower path.
    __device__ __forceinline__ int exact(uint32_t least) const {
        const uint32_t place = least >> 8;
        bool in[2], on[PathSets];
        uint32_t mine = kAll;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            in[s] = slot[s].key >> 8 == place;
            if (in[s]) mine = smaller(mine, high_half(slot[s].weight));
        }
#pragma unroll
        for (int k = 0; k < PathSets; ++k) {
            on[k] = path_key[k] >> 8 == place;
            if (on[k]) mine = smaller(mine, high_half(path_weight[k]));
        }
        const uint32_t high = __reduce_min_sync(kAll, mine);
        if (high >= kNobody) return -1;
        mine = kAll;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            in[s] = in[s] && high_half(slot[s].weight) == high;
            if (in[s]) mine = smaller(mine, low_half(slot[s].weight));
        }
#pragma unroll
        for (int k = 0; k < PathSets; ++k) {
            on[k] = on[k] && high_half(path_weight[k]) == high;
            if (on[k]) mine = smaller(mine, low_half(path_weight[k]));
        }
        const uint32_t low = __reduce_min_sync(kAll, mine);
        mine = kAll;
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (in[s] && low_half(slot[s].weight) == low) mine = smaller(mine, tie(slot[s], lane + 32 * s));
#pragma unroll
        for (int k = 0; k < PathSets; ++k)
            if (on[k] && low_half(path_weight[k]) == low)
                mine = smaller(mine, 1u << 31 | static_cast<uint32_t>(64 + lane + 32 * k));
        return static_cast<int>(__reduce_min_sync(kAll, mine) & kIds);
    }

    // The slot or path of the heaviest candidate; -1: there is none.
    __device__ __forceinline__ int next() const {
        uint32_t mine = smaller(slot[0].key, slot[1].key);
#pragma unroll
        for (int k = 0; k < PathSets; ++k) mine = smaller(mine, path_key[k]);
        const uint32_t least = __reduce_min_sync(kAll, mine);
        bool others = close(slot[0].key, least) || close(slot[1].key, least);
#pragma unroll
        for (int k = 0; k < PathSets; ++k) others = others || close(path_key[k], least);
        return __any_sync(kAll, others) ? exact(least) : static_cast<int>(least & kIds);
    }

    // The child of node `from` with token `wanted`, made where it is not there yet.
    __device__ __forceinline__ int find_or_add(int& count, int from, int at_depth, int32_t wanted,
                                               double weight) {
        const uint32_t hit0 = __ballot_sync(kAll, parent[0] == from && token[0] == wanted);
        const uint32_t hit1 = __ballot_sync(kAll, parent[1] == from && token[1] == wanted);
        if (hit0 != 0) return __ffs(static_cast<int>(hit0)) - 1;
        if (hit1 != 0) return __ffs(static_cast<int>(hit1)) + 31;
        ++count;
        if (lane == 0) {
            sm.node_token[count] = wanted;
            sm.node_parent[count] = from;
            sm.node_depth[count] = at_depth;
            sm.node_weight[count] = weight;
        }
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (lane + 32 * s == count) {
                parent[s] = from;
                token[s] = wanted;
            }
        return count;
    }

    // Slot `id`'s candidate becomes prefix `prefix`.
    template <int From, int To>
    __device__ __forceinline__ void pop_table(int id, int prefix, int& count) {
        const Winner w = winner<From>(id);
        const int cell = __shfl_sync(kAll, slot[From].at, id & 31);
        const int from = __shfl_sync(kAll, owner[From], id & 31);
        slot[From].key = new_key<From, From, To>(id, prefix, w);
        if (From != To) slot[To].key = new_key<To, From, To>(id, prefix, w);
        advance<From, To>(id, prefix, w);
        const int at = find_or_add(count, from, w.below / kRow, sm.cell_token[cell], w.weight);
        if (lane == prefix - 32 * To) owner[To] = at;
    }

    // The next step of path `id` - 64, one of path_*[K].
    template <int K>
    __device__ __forceinline__ void pop_path(int id, int& count) {
        const int lead = id & 31;
        const int from = __shfl_sync(kAll, node[K], lead), d = __shfl_sync(kAll, depth[K], lead);
        const double weight = shuffle(path_weight[K], lead);
        const int step = (id - 64) * kMaxDepth + d - 1;
        if (lane == lead) {
            path_weight[K] = d < length[K] ? weight + static_cast<double>(step_weight[step + 1]) : infinity();
            path_key[K] = key(path_weight[K], id);
            depth[K] = d + 1;
        }
        const int at = find_or_add(count, from, d, step_token[step], weight);
        if (lane == lead) node[K] = at;
    }

    // Pops until there are `budget` nodes or no candidate is left. The number of nodes.
    __device__ __forceinline__ int pop(int budget) {
        int count = 0, prefixes = 0;
#pragma unroll 1
        while (count < budget) {
            const int id = next();
            if (id < 0) break;
            if (id >= 64) {
                if (PathSets == 1 || id < 96)
                    pop_path<0>(id, count);
                else if (id < 128)
                    pop_path<PathSets == 1 ? 0 : 1>(id, count);
                else if (id < 160)
                    pop_path<PathSets == 1 ? 0 : 2>(id, count);
                else
                    pop_path<PathSets == 1 ? 0 : 3>(id, count);
                continue;
            }
            ++prefixes;
            if (prefixes < 32)
                pop_table<0, 0>(id, prefixes, count);
            else if (id < 32)
                pop_table<0, 1>(id, prefixes, count);
            else
                pop_table<1, 1>(id, prefixes, count);
        }
        return count;
    }
};

}  // namespace kdt::cuda::tree_build
