// Popping where there are no paths: every prefix of the table is a node, prefix n is node n.
//
// `Sets`: slot[0] is enough for the first 31 nodes, then both are in use. `From`: which of them the winner is
// in; the new node's is always the last.
#pragma once

#include "backend/cuda/build_tree_frontier.cuh"

namespace kdt::cuda::tree_build {

struct TableFrontier : Frontier<6> {
    using Frontier<6>::Frontier;

    template <int Sets>
    __device__ __forceinline__ uint32_t smallest_low(const bool (&in)[2]) const {
        const uint32_t low0 = in[0] ? low_half(slot[0].weight) : kAll,
                       low1 = Sets > 1 && in[1] ? low_half(slot[1].weight) : kAll;
        return __reduce_min_sync(kAll, smaller(low0, low1));
    }

    // The slot of the heaviest candidate among those that share the upper bits of key `least`; the smallest
    // of their lower halves is `low`. False: there is no candidate.
    template <int Sets>
    __device__ __forceinline__ bool exact(uint32_t least, uint32_t low, int& id) const {
        const uint32_t place = least >> 6;
        bool in[2] = {(slot[0].key ^ least) <= kIds, Sets > 1 && (slot[1].key ^ least) <= kIds};
        if (place - 1 >= kTop - 1) {  // 0 or kTop: cut, the upper halves differ
            const uint32_t high0 = in[0] ? high_half(slot[0].weight) : kAll,
                           high1 = Sets > 1 && in[1] ? high_half(slot[1].weight) : kAll;
            const uint32_t high = __reduce_min_sync(kAll, smaller(high0, high1));
            if (high >= kNobody) return false;
            in[0] = high0 == high;
            in[1] = high1 == high;
            low = smallest_low<Sets>(in);
        }
        // (no && on what lanes may differ in: a branch there would cost the warp its convergence)
        const uint32_t tie0 = tie(slot[0], lane), tie1 = Sets > 1 ? tie(slot[1], lane + 32) : kAll;
        const bool low0 = in[0] & (low_half(slot[0].weight) == low),
                   low1 = Sets > 1 ? in[1] & (low_half(slot[1].weight) == low) : false;
        id =
            static_cast<int>(__reduce_min_sync(kAll, smaller(low0 ? tie0 : kAll, low1 ? tie1 : kAll)) & kIds);
        return true;
    }

    // One pop. `least` is the smallest key, and becomes the next one. Unless `Settled`, the candidate that it
    // names is popped only if no other one is close and this is not the last pop; false: it was not, and
    // `low` is what `exact` asks for.
    template <int From, int Sets, bool Settled>
    __device__ __forceinline__ bool take(int id, int& count, int limit, uint32_t& least, uint32_t& low) {
        constexpr int To = Sets - 1;
        const Winner w = winner<From>(id);
        bool wait = false;
        if (!Settled) {
            const uint32_t far0 = slot[0].key ^ least, far1 = Sets > 1 ? slot[1].key ^ least : kAll;
            wait = __any_sync(kAll, far0 - 1 < kIds || (Sets > 1 && far1 - 1 < kIds) || count + 1 >= limit);
            low = smallest_low<Sets>({far0 <= kIds, far1 <= kIds});  // its time passes with the shuffles'
        }
        const uint32_t key0 = new_key<0, From, To>(id, count + 1, w),
                       key1 = Sets > 1 ? new_key<1, From, To>(id, count + 1, w) : kAll;
        const uint32_t mine = smaller(key0, key1);
        if (wait) return false;
        least = __reduce_min_sync(kAll, mine);
        ++count;
        slot[0].key = key0;
        if (Sets > 1) slot[1].key = key1;
        if (lane == (id & 31)) {
            sm.record[count] = static_cast<uint32_t>(id << 16 | slot[From].at);
            sm.node_weight[count] = w.weight;
        }
        advance<From, To>(id, count, w);
        return true;
    }

    // Pops until there are `limit` nodes; false: no candidate is left.
    template <int Sets>
    __device__ __forceinline__ bool pop(int& count, int limit) {
        if (count >= limit) return true;
        uint32_t least = __reduce_min_sync(kAll, Sets > 1 ? smaller(slot[0].key, slot[1].key) : slot[0].key);
#pragma unroll 1
        for (;;) {
            int id = static_cast<int>(least & kIds);
            uint32_t low;
            if (Sets == 1 || id < 32) {
                if (take<0, Sets, false>(id, count, limit, least, low)) continue;
            } else {
                if (take<Sets - 1, Sets, false>(id, count, limit, least, low)) continue;
            }
            if (!exact<Sets>(least, low, id)) return false;
            if (Sets == 1 || id < 32)
                take<0, Sets, true>(id, count, limit, least, low);
            else
                take<Sets - 1, Sets, true>(id, count, limit, least, low);
            if (count >= limit) return true;
        }
    }
};

}  // namespace kdt::cuda::tree_build
