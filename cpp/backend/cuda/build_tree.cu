// Best-first build of the draft tree: the algorithm of cpp/ddtree/build.cpp in one launch, bit for bit
// (docs/kernels/tree.md). All warps read the proposal; one warp pops, its frontier in registers.
//
// Weights are sums of non-positive numbers, kept as magnitudes: the bits of a non-negative float64 order as
// an integer, the heaviest candidate is the smallest, and "no candidate" is +infinity.
#include "backend/cuda/device.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/tree.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kNobody = 0x7FF00000u;  // high half of +infinity
// A row of the table in shared memory: its usable ranks, then infinities. Three rows more than the table has
// end every chain of first children and are looked ahead into.
constexpr int kRow = kMaxTableWidth + 4, kRows = kMaxTableDepth + 3;
static_assert(kMaxTableWidth == 64 && kMaxNodes == 64 && kMaxDraftPaths == 4 * 32);

struct Build {
    int32_t cell_token[kRows * kRow];
    double cell[kRows * kRow];  // magnitudes
    int32_t width[kRows];       // usable cells of a row

    uint32_t record[kMaxTreeRows];  // of node n > 0 where there are no paths: parent << 16 | cell

    double node_weight[kMaxTreeRows];  // magnitudes
    int32_t node_token[kMaxTreeRows], node_parent[kMaxTreeRows], node_depth[kMaxTreeRows];
    int32_t node_source[kMaxTreeRows];
    int32_t in_row[kMaxTreeRows];
    int32_t count;
    int32_t repeated;  // a row holds a token twice

    int32_t path_length[kMaxDraftPaths];  // usable steps
    // then, with paths: float [max_paths, kMaxDepth] magnitudes, int32 [max_paths, kMaxDepth] tokens
};

__device__ __forceinline__ bool is_log_probability(float x) {
    return x <= 0.0f && x > -INFINITY;
}

__device__ __forceinline__ double as_double(uint32_t high, uint32_t low) {
    return __hiloint2double(static_cast<int>(high), static_cast<int>(low));
}

__device__ __forceinline__ uint32_t high_half(double x) {
    return static_cast<uint32_t>(__double2hiint(x));
}

__device__ __forceinline__ uint32_t low_half(double x) {
    return static_cast<uint32_t>(__double2loint(x));
}

__device__ __forceinline__ double infinity() {
    return as_double(kNobody, 0);
}

// The value of lane `lane`.
__device__ __forceinline__ double shuffle(double x, int lane) {
    return as_double(__shfl_sync(kAll, high_half(x), lane), __shfl_sync(kAll, low_half(x), lane));
}

__device__ __forceinline__ uint32_t smaller(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

// Row d of the table as it is: rank r is cell r. One warp.
__device__ __forceinline__ void prepare_row(Build& b, int d, int width, int vocab, const int32_t (&token)[2],
                                            const float (&logp)[2], int lane) {
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
    int32_t* const row = b.cell_token + d * kRow;
    double* const cell = b.cell + d * kRow;
    row[lane] = token[0];
    row[lane + 32] = token[1];
    cell[lane] = lane < usable ? static_cast<double>(fabsf(logp[0])) : infinity();
    cell[lane + 32] = lane + 32 < usable ? static_cast<double>(fabsf(logp[1])) : infinity();
    if (lane < kRow - 64) cell[lane + 64] = infinity();
    if (lane == 0) b.width[d] = usable;
}

// Which entries of row d are the first with their token: bit l of `first[s]` is entry l + 32 s. One warp.
__device__ __forceinline__ void first_entries(const Build& b, int d, int lane, uint32_t (&first)[2]) {
    const int32_t* const row = b.cell_token + d * kRow;
    const int width = b.width[d];
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

__device__ __forceinline__ bool row_repeats(const Build& b, int d, int lane) {
    uint32_t first[2];
    first_entries(b, d, lane, first);
    return __popc(first[0]) + __popc(first[1]) < b.width[d];
}

// Closes the gaps that second and later entries of a token leave in row d. One warp.
__device__ __forceinline__ void pack_row(Build& b, int d, int lane) {
    uint32_t first[2];
    first_entries(b, d, lane, first);
    int32_t* const row = b.cell_token + d * kRow;
    double* const cell = b.cell + d * kRow;
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
    if (lane == 0) b.width[d] = __popc(first[0]) + __popc(first[1]);
}

// The table's part of the frontier. Prefixes of the table are numbered as they are popped, the root 0
// (without paths they are the nodes); lane l has slots for prefixes l and l + 32, each with the prefix's next
// child.
struct Slot {
    uint32_t key;           // of the candidate
    double weight, parent;  // of the candidate, of the prefix
    int at, below;          // the candidate's cell; the first cell of the next row
    int order;              // of the prefix, below
    // What a pop makes of the candidate, computed before it is asked for.
    double child, sibling;
    uint32_t child_key, sibling_key;
};

// What the winner's lane tells the others.
struct Winner {
    double weight, child;
    uint32_t child_key;
    int below, order;
};

// The warp that pops.
//
// A candidate's key is an integer of 32 bits: the upper ones of its magnitude, cut to the binades 2^-32 ..
// 2^32, and in its last `IdBits` the slot that it stands in. So one minimum over the warp says which
// candidate is the heaviest, and where it is; where another one shares its upper bits, `exact` looks at all
// 64 bits and at the rank paths.
//
// Rank paths are compared without being written down. In the lexicographic order of all prefixes popped so
// far, a prefix has a place `first`, and those that begin with it end before `end`; what is popped next under
// it goes there. `order` is end << 7 | 127 - first. Of candidates of equal weight the smaller rank path is
// the one whose prefix ends first, and of those that end together the longest, whose candidate extends a
// child of the others: the smallest `order`.
template <int IdBits>
struct Popper {
    static constexpr int kBase = (1023 - 32) << 20, kTop = (1 << 26) - 1;
    static constexpr uint32_t kIds = (1u << IdBits) - 1u;

    Build& b;
    const int lane;
    Slot slot[2];

    __device__ __forceinline__ Popper(Build& build, int its_lane) : b(build), lane(its_lane) {}

    static __device__ __forceinline__ uint32_t key(double magnitude, int id) {
        const int place = min(max(__double2hiint(magnitude) - kBase, 0), kTop);
        return static_cast<uint32_t>(place >> (IdBits - 6)) << IdBits | static_cast<uint32_t>(id);
    }

    template <int S>
    __device__ __forceinline__ void look_ahead() {
        Slot& o = slot[S];
        o.child = o.weight + b.cell[o.below];
        o.sibling = o.parent + b.cell[o.at + 1];
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
            o.weight = b.cell[o.at];
            o.parent = 0.0;
            o.key = key(o.weight, lane + 32 * s);
            o.order = root ? 1 << 7 | 127 : 127;
        }
        look_ahead<0>();
        look_ahead<1>();
    }

    // Of slot `id`, which is one of slot[From].
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

// Without paths every prefix is a node.
struct TablePopper : Popper<6> {
    using Popper<6>::Popper;

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
            b.record[count] = static_cast<uint32_t>(id << 16 | slot[From].at);
            b.node_weight[count] = w.weight;
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

// Table and paths together: a candidate may be a node that stands already, so prefixes and nodes differ.
// `Sets`: of 32 paths each.
template <int Sets>
struct MergedPopper : Popper<8> {
    const float* step_weight;  // [max_paths, kMaxDepth]
    const int32_t* step_token;
    int owner[2];             // nodes of the slots' prefixes
    uint32_t path_key[Sets];  // of path lane + 32 k: its next step
    double path_weight[Sets];
    int node[Sets], depth[Sets], length[Sets];
    int parent[2], token[2];  // of nodes lane and lane + 32

    __device__ __forceinline__ MergedPopper(Build& build, int its_lane, const float* weights,
                                            const int32_t* tokens)
        : Popper<8>(build, its_lane), step_weight(weights), step_token(tokens) {}

    __device__ __forceinline__ void begin_paths(int paths, int max_depth) {
#pragma unroll
        for (int k = 0; k < Sets; ++k) {
            const int q = lane + 32 * k;
            length[k] = q < paths ? min(b.path_length[q], max_depth) : 0;
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

    // As TablePopper's; the table goes before paths, then the lower path.
    __device__ __forceinline__ int exact(uint32_t least) const {
        const uint32_t place = least >> 8;
        bool in[2], on[Sets];
        uint32_t mine = kAll;
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            in[s] = slot[s].key >> 8 == place;
            if (in[s]) mine = smaller(mine, high_half(slot[s].weight));
        }
#pragma unroll
        for (int k = 0; k < Sets; ++k) {
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
        for (int k = 0; k < Sets; ++k) {
            on[k] = on[k] && high_half(path_weight[k]) == high;
            if (on[k]) mine = smaller(mine, low_half(path_weight[k]));
        }
        const uint32_t low = __reduce_min_sync(kAll, mine);
        mine = kAll;
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (in[s] && low_half(slot[s].weight) == low) mine = smaller(mine, tie(slot[s], lane + 32 * s));
#pragma unroll
        for (int k = 0; k < Sets; ++k)
            if (on[k] && low_half(path_weight[k]) == low)
                mine = smaller(mine, 1u << 31 | static_cast<uint32_t>(64 + lane + 32 * k));
        return static_cast<int>(__reduce_min_sync(kAll, mine) & kIds);
    }

    __device__ __forceinline__ int next() const {
        uint32_t mine = smaller(slot[0].key, slot[1].key);
#pragma unroll
        for (int k = 0; k < Sets; ++k) mine = smaller(mine, path_key[k]);
        const uint32_t least = __reduce_min_sync(kAll, mine);
        bool others = close(slot[0].key, least) || close(slot[1].key, least);
#pragma unroll
        for (int k = 0; k < Sets; ++k) others = others || close(path_key[k], least);
        return __any_sync(kAll, others) ? exact(least) : static_cast<int>(least & kIds);
    }

    // The node (from, wanted), made where it is not there yet.
    __device__ __forceinline__ int take(int& count, int from, int at_depth, int32_t wanted, double weight) {
        const uint32_t hit0 = __ballot_sync(kAll, parent[0] == from && token[0] == wanted);
        const uint32_t hit1 = __ballot_sync(kAll, parent[1] == from && token[1] == wanted);
        if (hit0 != 0) return __ffs(static_cast<int>(hit0)) - 1;
        if (hit1 != 0) return __ffs(static_cast<int>(hit1)) + 31;
        ++count;
        if (lane == 0) {
            b.node_token[count] = wanted;
            b.node_parent[count] = from;
            b.node_depth[count] = at_depth;
            b.node_weight[count] = weight;
        }
#pragma unroll
        for (int s = 0; s < 2; ++s)
            if (lane + 32 * s == count) {
                parent[s] = from;
                token[s] = wanted;
            }
        return count;
    }

    template <int From, int To>
    __device__ __forceinline__ void pop_table(int id, int prefix, int& count) {
        const Winner w = winner<From>(id);
        const int cell = __shfl_sync(kAll, slot[From].at, id & 31);
        const int from = __shfl_sync(kAll, owner[From], id & 31);
        slot[From].key = new_key<From, From, To>(id, prefix, w);
        if (From != To) slot[To].key = new_key<To, From, To>(id, prefix, w);
        advance<From, To>(id, prefix, w);
        const int at = take(count, from, w.below / kRow, b.cell_token[cell], w.weight);
        if (lane == prefix - 32 * To) owner[To] = at;
    }

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
        const int at = take(count, from, d, step_token[step], weight);
        if (lane == lead) node[K] = at;
    }

    __device__ __forceinline__ int pop(int budget) {
        int count = 0, prefixes = 0;
#pragma unroll 1
        while (count < budget) {
            const int id = next();
            if (id < 0) break;
            if (id >= 64) {
                if (Sets == 1 || id < 96)
                    pop_path<0>(id, count);
                else if (id < 128)
                    pop_path<Sets == 1 ? 0 : 1>(id, count);
                else if (id < 160)
                    pop_path<Sets == 1 ? 0 : 2>(id, count);
                else
                    pop_path<Sets == 1 ? 0 : 3>(id, count);
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

// Usable steps of a path, and its steps in shared memory. One warp.
__device__ __forceinline__ void prepare_path(Build& b, const BuildTreeArgs& a, int q, float* weight,
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
    if (lane == 0) b.path_length[q] = low < 32 ? low : 32 + upper;
}

// Everyone who proposes a node, whether or not their candidate came up.
__device__ __forceinline__ void mark_sources(Build& b, int count, int paths, const int32_t* step_token,
                                             int table_rows, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    for (int i = thread; i <= count; i += kThreads) {
        const int d = b.node_depth[i] - 1;
        bool hit = i == 0;
        if (i > 0 && d < table_rows)
            for (int j = 0; j < b.width[d] && !hit; ++j) hit = b.cell_token[d * kRow + j] == b.node_token[i];
        b.in_row[i] = hit;
        b.node_source[i] = 0;
    }
    __syncthreads();
    for (int i = 1 + thread; i <= count; i += kThreads) {
        bool all = true;
        for (int n = i; n > 0 && all; n = b.node_parent[n]) all = b.in_row[n] != 0;
        if (all) atomicOr(&b.node_source[i], 1);
    }
    int parent[3], token[3];
    for (int s = 0; s < 3; ++s) {
        const int n = lane + 32 * s;
        parent[s] = n > 0 && n <= count ? b.node_parent[n] : -2;
        token[s] = n > 0 && n <= count ? b.node_token[n] : -1;
    }
    for (int q = warp; q < paths; q += kWarps) {
        int node = 0;
        for (int d = 0; d < b.path_length[q]; ++d) {
            const int32_t wanted = step_token[q * kMaxDepth + d];
            int next = -1;
            for (int s = 2; s >= 0; --s) {
                const uint32_t hit = __ballot_sync(kAll, parent[s] == node && token[s] == wanted);
                if (hit != 0) next = 32 * s + __ffs(static_cast<int>(hit)) - 1;
            }
            if (next < 0) break;
            node = next;
            if (lane == 0) atomicOr(&b.node_source[node], 2);
        }
    }
}

// `PathSets`: of 32 draft paths each; 0: none.
template <int PathSets>
__global__ void __launch_bounds__(kThreads, 1) build_tree(const BuildTreeArgs a) {
    constexpr bool Paths = PathSets > 0;
    ptx::grid_launch_next();
    ptx::grid_wait();
    Build& b = *reinterpret_cast<Build*>(ptx::shared_memory());
    float* const step_weight = reinterpret_cast<float*>(&b + 1);
    int32_t* const step_token = reinterpret_cast<int32_t*>(step_weight + a.proposal.max_paths * kMaxDepth);
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    // Read from lane 0: so the compiler knows that the lanes agree, and that the warp that pops is whole.
    const int warp = __shfl_sync(kAll, thread / 32, 0);
    const ProposalArrays& p = a.proposal;
    const int width = p.table_depth == nullptr ? 0 : p.table_width;
    const int table_rows =
        width < 1 ? 0 : min(min(max(__ldcg(p.table_depth), 0), kMaxTableDepth), a.max_depth);
    const int32_t root = __ldcg(a.root);
    const int paths = Paths ? min(max(__ldcg(p.path_count), 0), p.max_paths) : 0;

    constexpr int kTurns = (kMaxTableDepth + kWarps - 1) / kWarps;
    int32_t token[kTurns][2];
    float logp[kTurns][2];
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int d = warp + turn * kWarps, r = lane + 32 * half, at = d * width + r;
            const bool there = d < table_rows && r < width;
            token[turn][half] = there ? __ldcg(p.table_token + at) : -1;
            logp[turn][half] = there ? __ldcg(p.table_logp + at) : 1.0f;
        }
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
        const int d = warp + turn * kWarps;
        if (d < table_rows) prepare_row(b, d, width, a.vocab, token[turn], logp[turn], lane);
    }
    for (int i = thread; i < (kRows - table_rows) * 4; i += kThreads)
        b.cell[(table_rows + i / 4) * kRow + i % 4] = infinity();
    if (Paths)
        for (int q = warp; q < paths; q += kWarps) prepare_path(b, a, q, step_weight, step_token, lane);
    if (thread == 0) {
        b.node_token[0] = root;
        b.node_parent[0] = -1;
        b.node_depth[0] = 0;
        b.node_weight[0] = 0.0;
        b.repeated = 0;
    }
    __syncthreads();

    // Rows that hold a token twice are rare: while the first warp pops as if there were none, the others
    // look.
#pragma unroll 1
    for (bool packed = false;; packed = true) {
        if (warp == 0) {
            int count = 0;
            if constexpr (Paths) {
                MergedPopper<PathSets> popper(b, lane, step_weight, step_token);
                popper.begin();
                popper.begin_paths(paths, a.max_depth);
                count = popper.pop(a.budget);
            } else {
                TablePopper popper(b, lane);
                popper.begin();
                // prefix n has slot n; what node 64 leads to is not asked for
                if (popper.pop<1>(count, min(a.budget, 31))) popper.pop<2>(count, a.budget);
            }
            if (lane == 0) b.count = count;
        } else if (!packed && warp % 4 != 0) {  // not those that share the first warp's scheduler
            for (int d = warp - 1 - warp / 4; d < table_rows; d += kWarps / 4 * 3)
                if (row_repeats(b, d, lane) && lane == 0) b.repeated = 1;
        }
        __syncthreads();
        if (packed || b.repeated == 0) break;
        for (int d = warp; d < table_rows; d += kWarps) pack_row(b, d, lane);
        __syncthreads();
    }

    const int count = b.count;
    if (Paths) {
        mark_sources(b, count, paths, step_token, table_rows, thread);
        __syncthreads();
    }
    for (int i = thread; i <= count; i += kThreads) {
        int32_t node_token = b.node_token[i], parent = b.node_parent[i], depth = b.node_depth[i], source = 0;
        if (Paths) {
            source = b.node_source[i];
        } else if (i > 0) {
            const int cell = static_cast<int>(b.record[i] & 0xFFFF);
            node_token = b.cell_token[cell];
            parent = static_cast<int32_t>(b.record[i] >> 16);
            depth = cell / kRow + 1;
            source = 1;
        }
        a.tree.token[i] = node_token;
        a.tree.parent[i] = parent;
        a.tree.depth[i] = depth;
        a.tree.source[i] = source;
        a.tree.weight[i] = 0.0 - b.node_weight[i];
    }
    if (thread == 0) *a.tree.count = count;
}

}  // namespace

void launch_build_tree(const GemmLaunch& l, const BuildTreeArgs& args) {
    const bool paths = args.proposal.path_count != nullptr && args.proposal.max_paths > 0;
    const int steps = paths ? args.proposal.max_paths * kMaxDepth : 0;
    const Launch as{l.stream, l.device, l.name,
                    dim3(1),  kThreads, static_cast<int>(sizeof(Build)) + steps * 8};
    if (!paths)
        launch<build_tree<0>>(as, args);
    else if (args.proposal.max_paths <= 32)
        launch<build_tree<1>>(as, args);
    else
        launch<build_tree<4>>(as, args);
}

}  // namespace kdt::cuda
