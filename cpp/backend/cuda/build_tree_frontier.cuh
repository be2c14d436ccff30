// The table's part of the frontier: the candidates of a best-first search, in the registers of one warp.
//
// Prefixes of the table are numbered as they are popped, the root 0 (without paths they are the nodes).
// Prefix n has a slot, in which its next child waits: the heaviest one that has not been popped yet.
//
//              lane 0      1      2            31
//   slot[0]         0      1      2    ...     31    prefixes
//   slot[1]        32     33     34    ...     63
//
// A pop takes the heaviest candidate of all slots and makes it a prefix. Its old slot goes on to its next
// sibling (parent's weight + next cell), its own one begins with its first child (its weight + first cell of
// the next row). Both are computed ahead, so that a pop waits for one minimum and for what the winning lane
// tells the others.
//
// A candidate's key is an integer of 32 bits: the upper ones of its magnitude, cut to the binades 2^-32 ..
// 2^32, and in its last `IdBits` the slot that it stands in. So one minimum over the warp says which
// candidate is the heaviest, and where it is; where another one shares its upper bits, `exact` (of
// build_tree_table.cuh, build_tree_merged.cuh) looks at all 64 bits and at the rank paths.
//
// Rank paths are compared without being written down. In the lexicographic order of all prefixes popped so
// far, a prefix has a place `first`, and those that begin with it end before `end`; what is popped next under
// it goes there.
//
//   place      0   1   2   3   4         first  end
//   root       [-----------------)           0    5
//    child 0       [---------)               1    4      its next candidate would be at place 4,
//     child 0          [-)                   2    3
//     child 1              [-)               3    4      and this one's there too, but it is the smaller
//    child 1                   [-)           4    5
//
// Of candidates of equal weight the smaller rank path is the one whose prefix ends first, and of those that
// end together the longest, whose candidate extends a child of the others: the smallest
// `order` = end << 7 | 127 - first.
#pragma once

#include "backend/cuda/build_tree.cuh"

namespace kdt::cuda::tree_build {

struct Slot {
    uint32_t key;           // of the candidate
    double weight, parent;  // of the candidate, of the prefix
    int at, below;          // the candidate's cell; the first cell of the next row
    int order;              // of the prefix
    // What a pop makes of the candidate, computed before it is asked for.
    double child, sibling;
    uint32_t child_key, sibling_key;
};

// The popped candidate, as its lane tells it to the others: it becomes a prefix.
struct Winner {
    double weight, child;  // its own, its first child's
    uint32_t child_key;    // without a slot
    int below;             // the first cell of the next row
    int order;             // of its parent
};

// `IdBits` of a key name a slot; those of paths are numbered behind the table's 64.
template <int IdBits>
struct Frontier {
    // The upper half of 2^-32, and the most that is left of one below 2^32 once this has been taken off.
    static constexpr int kBase = (1023 - 32) << 20, kTop = (1 << 26) - 1;
    static constexpr uint32_t kIds = (1u << IdBits) - 1u;

    Shared& sm;
    const int lane;
    Slot slot[2];

    __device__ __forceinline__ Frontier(Shared& shared, int its_lane) : sm(shared), lane(its_lane) {}

    static __device__ __forceinline__ uint32_t key(double magnitude, int id) {
        const int place = min(max(__double2hiint(magnitude) - kBase, 0), kTop);
        return static_cast<uint32_t>(place >> (IdBits - 6)) << IdBits | static_cast<uint32_t>(id);
    }

    template <int S>
    __device__ __forceinline__ void look_ahead() {
        Slot& o = slot[S];
        o.child = o.weight + sm.cell[o.below];
        o.sibling = o.parent + sm.cell[o.at + 1];
        o.child_key = key(o.child, 0);
        o.sibling_key = key(o.sibling, lane + 32 * S);
    }

    __device__ __forceinline__ void begin() {
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const bool root = s == 0 && lane == 0;
            Slot& o = slot[s];
            o.at = root ? 0 : kMaxTableDepth * kRow;  // the empty rows past the table
            o.below = o.at + kRow;
            o.weight = sm.cell[o.at];
            o.parent = 0.0;
            o.key = key(o.weight, lane + 32 * s);
            o.order = root ? 1 << 7 | 127 : 127;
        }
        look_ahead<0>();
        look_ahead<1>();
    }

    // What slot `id`, which is one of slot[From], offers.
    template <int From>
    __device__ __forceinline__ Winner winner(int id) const {
        const Slot& o = slot[From];
        const int lead = id & 31;
        Winner w;
        w.child_key = __shfl_sync(kAll, o.child_key, lead);
        w.child = shuffle(o.child, lead);
        w.weight = shuffle(o.weight, lead);
        const int places = __shfl_sync(kAll, o.below << 14 | o.order, lead);
        w.below = places >> 14;
        w.order = places & 0x3FFF;
        return w;
    }

    // Slot `id`, one of slot[From], goes on to the sibling; slot `prefix`, one of slot[To] (64: none), begins
    // with the first child. Keys first, they are what the next pop waits for: new_key<S> is slot[S]'s.
    template <int S, int From, int To>
    __device__ __forceinline__ uint32_t new_key(int id, int prefix, const Winner& w) const {
        uint32_t key = slot[S].key;
        if (S == From && lane == (id & 31)) key = slot[S].sibling_key;
        if (S == To && lane == prefix - 32 * To) key = w.child_key | static_cast<uint32_t>(lane + 32 * S);
        return key;
    }

    template <int From, int To>
    __device__ __forceinline__ void advance(int id, int prefix, const Winner& w) {
        const int end = w.order >> 7;
#pragma unroll
        for (int s = 0; s <= To; ++s) {
            // the prefix is put behind all that begin with its parent
            const int order = slot[s].order;
            if (order >= w.order) slot[s].order += 1 << 7;
            if ((order & 127) <= 127 - end) slot[s].order -= 1;
        }
        if (lane == (id & 31)) {
            slot[From].weight = slot[From].sibling;
            slot[From].at += 1;
        }
        if (lane == prefix - 32 * To) {
            slot[To].weight = w.child;
            slot[To].parent = w.weight;
            slot[To].at = w.below;
            slot[To].below = w.below + kRow;
            slot[To].order = (end + 1) << 7 | (127 - end);
        }
        look_ahead<To>();
        if (From != To) look_ahead<From>();
    }

    // Whether a key has the upper bits of the smallest one and is not it.
    static __device__ __forceinline__ bool close(uint32_t key, uint32_t least) {
        return (key ^ least) - 1u < kIds;
    }

    static __device__ __forceinline__ uint32_t tie(const Slot& o, int id) {
        return static_cast<uint32_t>(o.order) << IdBits | static_cast<uint32_t>(id);
    }
};

}  // namespace kdt::cuda::tree_build
