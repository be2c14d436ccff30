// Eight blocks (a cluster) share a row of logits, each with a fixed slice of the vocabulary, which it reads
// once (docs/kernels/sampling.md).
//
// Tokens are ordered by a 64-bit key: the logit, order-preserving, above the complement of the id; so no two
// tokens tie. "The k greatest" and "the fewest whose mass reaches a limit" are then sets that the keys fix.
// Counts and masses are integers (mass: exp(z) in units of 2^-40), whose sums have no order. So there may be
// two ways to a set, a quick one that lists a few candidates and one that always works, and no bit tells
// which it was.
#include "backend/cuda/sampling.h"

#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr int kBlocks = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr float kMassUnit = 1099511627776.0f;  // 2^40
constexpr int kHeld = 20480;        // logits of a slice that fit into shared memory: vocabularies to 163,840
constexpr int kCandidates = 2048;   // of a row
constexpr int kMostRanks = 1024;    // that are looked for in a list of candidates
constexpr int kNucleusRanks = 256;  // candidates from which top_p without top_k is tried
constexpr int kBins = 256;
constexpr uint64_t kNan = ~0ull;  // above every key

struct Space {
    uint64_t join[2][kWarps * 3];
    uint64_t list[kCandidates];  // this block's candidates; in block 0 at last everyone's, best first
    uint64_t warp_sum[kWarps];
    uint32_t bins[kBins];
    float sums[kWarps + 1];
    int32_t count;  // of this block's candidates
    int32_t kept;   // in block 0: of everyone's; -1: they do not suffice
    // then float [kHeld]
};
static_assert(kMaxTopTokens <= kMostRanks && kCandidates % kThreads == 0);

__device__ __forceinline__ uint32_t float_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);  // -0 orders as +0
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ uint64_t token_key(float x, int id) {
    return static_cast<uint64_t>(float_key(x)) << 32 | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

__device__ __forceinline__ int key_id(uint64_t key) {
    return static_cast<int>(0xFFFFFFFFu - static_cast<uint32_t>(key));
}

__device__ __forceinline__ float key_logit(uint64_t key) {
    const uint32_t high = static_cast<uint32_t>(key >> 32);
    return __uint_as_float(high & 0x80000000u ? high ^ 0x80000000u : ~high);
}

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t x, int offset) {
    const uint32_t low = __shfl_xor_sync(kAll, static_cast<uint32_t>(x), offset);
    const uint32_t high = __shfl_xor_sync(kAll, static_cast<uint32_t>(x >> 32), offset);
    return static_cast<uint64_t>(high) << 32 | low;
}

__device__ __forceinline__ uint64_t cluster_load(const uint64_t* mine, uint32_t rank) {
    const uint32_t* const word = reinterpret_cast<const uint32_t*>(mine);
    return static_cast<uint64_t>(ptx::cluster_load_word(word + 1, rank)) << 32 |
           ptx::cluster_load_word(word, rank);
}

struct Sum {
    static __device__ __forceinline__ uint64_t join(uint64_t a, uint64_t b) { return a + b; }
};
struct Greatest {
    static __device__ __forceinline__ uint64_t join(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

template <class Op>
__device__ __forceinline__ uint64_t warp_join(uint64_t x) {
    for (int offset = 16; offset > 0; offset >>= 1) x = Op::join(x, shuffle_xor(x, offset));
    return x;
}

// What the blocks of a row do together.
struct Team {
    Space& space;
    int thread, warp, lane;
    int turn = 0;

    // N values of every thread of the cluster, joined; every thread gets the result. Two places in turn:
    // whoever writes one again has passed the meeting that follows everyone's reads of it.
    template <class Op, int N>
    __device__ __forceinline__ void join(uint64_t (&x)[N]) {
        uint64_t* const mine = space.join[turn];
        turn ^= 1;
        for (int i = 0; i < N; ++i) {
            x[i] = warp_join<Op>(x[i]);
            if (lane == 0) mine[i * kWarps + warp] = x[i];
        }
        ptx::cluster_sync();
        static_assert(kWarps == 16 && kBlocks == 8);
        for (int i = 0; i < N; ++i) {
            uint64_t each[4];  // of warp lane % 16 in blocks lane / 16, + 2, + 4, + 6
#pragma unroll
            for (int j = 0; j < 4; ++j)
                each[j] = cluster_load(mine + i * kWarps + lane % kWarps,
                                       static_cast<uint32_t>(lane / kWarps + 2 * j));
            x[i] = warp_join<Op>(Op::join(Op::join(each[0], each[1]), Op::join(each[2], each[3])));
        }
    }

    template <class Op>
    __device__ __forceinline__ uint64_t join(uint64_t x) {
        uint64_t one[1] = {x};
        join<Op, 1>(one);
        return one[0];
    }

    // Of one block's threads, when all of them call it.
    template <class Op>
    __device__ __forceinline__ uint64_t block_join(uint64_t x) {
        x = warp_join<Op>(x);
        if (lane == 0) space.warp_sum[warp] = x;
        __syncthreads();
        uint64_t all = space.warp_sum[0];
        for (int w = 1; w < kWarps; ++w) all = Op::join(all, space.warp_sum[w]);
        __syncthreads();
        return all;
    }
};

// A block's share of one row. Thread i has every 512th id. `Held`: in shared memory once `scan` has read it.
template <bool Held>
struct Slice {
    const float* x;
    float* held;
    int begin, end;

    __device__ __forceinline__ Slice(const float* row, int vocab, float* held_) : x(row), held(held_) {
        const int each = (vocab + kBlocks - 1) / kBlocks;
        begin = min(static_cast<int>(blockIdx.x) * each, vocab);
        end = min(begin + each, vocab);
    }

    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
#pragma unroll 2
        for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += kThreads)
            f(id, Held ? held[id - begin] : load_activation(x + id));
    }

    // The same, from global memory, several loads at a time.
    template <class F>
    __device__ __forceinline__ void for_each_first(const F& f) const {
        constexpr int kAhead = 8;
        for (int first = begin + static_cast<int>(threadIdx.x); first < end; first += kAhead * kThreads) {
            float v[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + i * kThreads < end) v[i] = load_activation(x + first + i * kThreads);
#pragma unroll
            for (int i = 0; i < kAhead; ++i)
                if (first + i * kThreads < end) {
                    if (Held) held[first + i * kThreads - begin] = v[i];
                    f(first + i * kThreads, v[i]);
                }
        }
    }
};

struct RowScan {
    uint64_t greatest;  // key
    float mine;         // the greatest logit of this thread, -infinity where it has none
    bool has_nan, has_finite;
};

template <bool Held>
__device__ __forceinline__ RowScan scan_row(const Slice<Held>& slice, Team& team) {
    if (team.thread < kBins) team.space.bins[team.thread] = 0;
    if (team.thread == 0) team.space.count = 0;
    uint64_t found[2] = {0, 0};  // greatest key, whether anything is finite
    float mine = -INFINITY;
    slice.for_each_first([&](int id, float x) {
        if (fabsf(x) < INFINITY) found[1] = 1;
        if (x > mine) mine = x;
        found[0] = Greatest::join(found[0], x != x ? kNan : token_key(x, id));
    });
    team.join<Greatest, 2>(found);
    return {found[0], mine, found[0] == kNan, found[1] != 0};
}

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

// Word 0 of Philox4x32-10 (Salmon et al., SC 2011).
__device__ __forceinline__ uint32_t philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0,
                                           uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(0xD2511F53u) * c0,
                       p1 = static_cast<uint64_t>(0xCD9E8D57u) * c2;
        const uint32_t high0 = static_cast<uint32_t>(p0 >> 32), high1 = static_cast<uint32_t>(p1 >> 32);
        const uint32_t n0 = high1 ^ c1 ^ k0, n2 = high0 ^ c3 ^ k1;
        c1 = static_cast<uint32_t>(p1);
        c3 = static_cast<uint32_t>(p0);
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c0;
}

__device__ __forceinline__ float gumbel(const SampleParams& s, uint32_t id, uint32_t position) {
    const uint32_t word =
        philox(id, position, s.choice, 0, static_cast<uint32_t>(s.seed), static_cast<uint32_t>(s.seed >> 32));
    const float v = fminf((static_cast<float>(word) + 0.5f) * 2.3283064365386963e-10f, 0.99999994f);
    const float e = v < 2.44140625e-4f ? fmaf(v * v, 0.5f, v) : -logf(1.0f - v);
    return -logf(e);
}

// What a token's noise can be: no token this far below the greatest has a chance against it, whose noise is
// above -2.82 while no noise is above 22.88.
constexpr float kHopeless = -26.0f;

struct Scale {
    SampleParams s;
    float greatest;

    __device__ __forceinline__ float z(float x) const {
        return x == greatest ? 0.0f : (x - greatest) / s.temperature;
    }
    __device__ __forceinline__ uint64_t mass(float x) const { return __float2ull_rn(expf(z(x)) * kMassUnit); }
    __device__ __forceinline__ uint64_t target(uint64_t total) const {
        const double limit = ceil(static_cast<double>(s.top_p) * static_cast<double>(total));
        return limit < 1.0 ? 1 : static_cast<uint64_t>(limit);
    }
    // Its key once the noise is added; 0: not in the race.
    __device__ __forceinline__ uint64_t noisy_key(int id, float x, uint32_t position) const {
        const float at = z(x);
        if (at < kHopeless || (s.min_p > 0.0f && !(expf(at) >= s.min_p))) return 0;
        return token_key(at + gumbel(s, static_cast<uint32_t>(id), position), id);
    }
};

// From the sorted list in block 0: the number of tokens that the filters keep, -1 where the list ends before
// top_p does. `total`: mass of the row, without top_k.
__device__ __forceinline__ int kept_of_list(Team& team, const Scale& scale, int listed, bool limits_k,
                                            uint64_t total) {
    Space& space = team.space;
    const int n = limits_k ? min(listed, scale.s.top_k) : listed;
    if (!(scale.s.top_p < 1.0f)) return n;
    if (limits_k) {
        total = 0;
        for (int i = team.thread; i < n; i += kThreads) total += scale.mass(key_logit(space.list[i]));
        total = team.block_join<Sum>(total);
    }
    const uint64_t target = scale.target(total);
    uint64_t before = 0;  // mass in front of this round
    int kept = 0;
    for (int first = 0; first < n; first += kThreads) {
        const int i = first + team.thread;
        const uint64_t mass = i < n ? scale.mass(key_logit(space.list[i])) : 0;
        uint64_t upto = mass;
        for (int offset = 1; offset < 32; offset <<= 1) {
            const uint32_t low = __shfl_up_sync(kAll, static_cast<uint32_t>(upto), offset);
            const uint32_t high = __shfl_up_sync(kAll, static_cast<uint32_t>(upto >> 32), offset);
            if (team.lane >= offset) upto += static_cast<uint64_t>(high) << 32 | low;
        }
        if (team.lane == 31) space.warp_sum[team.warp] = upto;
        __syncthreads();
        uint64_t lower = before;
        for (int w = 0; w < kWarps; ++w) {
            const uint64_t sum = space.warp_sum[w];
            if (w < team.warp) lower += sum;
            before += sum;
        }
        __syncthreads();
        kept += i < n && lower + upto - mass < target;
    }
    const int all = static_cast<int>(team.block_join<Sum>(static_cast<uint64_t>(kept)));
    return before < target ? -1 : all;
}

template <bool Held>
__global__ void __launch_bounds__(kThreads, Held ? 2 : 1) select(const SelectArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    if (row >= live_rows(a.rows)) return;
    Space& space = *reinterpret_cast<Space*>(ptx::shared_memory());
    Team team{space, thread, thread / 32, thread % 32};
    const Slice<Held> slice(a.logits + static_cast<long long>(row) * a.vocab, a.vocab,
                            reinterpret_cast<float*>(&space + 1));
    const SampleParams s = *a.sample;
    const uint32_t position = static_cast<uint32_t>(a.position[row]) + 1;
    const RowScan scan = scan_row(slice, team);
    const bool writes = blockIdx.x == 0 && thread == 0;
    const bool nothing = scan.has_nan || !scan.has_finite;
    if (nothing || s.temperature == 0.0f) {
        if (writes) a.token[row] = nothing ? -1 : key_id(scan.greatest);
        ptx::cluster_sync();
        return;
    }

    const Scale scale{s, key_logit(scan.greatest)};
    const bool limits_k = s.top_k > 0 && s.top_k < a.vocab, limits_p = s.top_p < 1.0f;
    const int ranks = limits_k ? s.top_k : limits_p ? min(kNucleusRanks, a.vocab) : 0;
    uint64_t total = 0;  // mass of the row
    if (limits_p && !limits_k) {
        slice.for_each([&](int, float x) { total += scale.mass(x); });
        total = team.join<Sum>(total);
    }
    if (ranks > 0 && ranks <= kMostRanks) {
        const int bin = bin_of_rank(team, scan.mine, scale.greatest, ranks);
        if (bin < kBins) {
            slice.for_each([&](int id, float x) {
                if (bin_of(x, scale.greatest) <= bin) list_candidate(space, token_key(x, id));
            });
            const int listed = collect(team);
            if (blockIdx.x == 0 && listed >= 0) {
                const int kept = kept_of_list(team, scale, listed, limits_k, total);
                uint64_t best = 0;
                for (int i = thread; i < kept; i += kThreads) {
                    const uint64_t key = space.list[i];
                    best = Greatest::join(best, scale.noisy_key(key_id(key), key_logit(key), position));
                }
                best = team.block_join<Greatest>(best);
                if (thread == 0) space.kept = kept;
                if (thread == 0 && kept >= 0) a.token[row] = key_id(best);
            }
            ptx::cluster_sync();
            const bool done = listed >= 0 && static_cast<int>(ptx::cluster_load_word(&space.kept, 0)) >= 0;
            if (done) {
                ptx::cluster_sync();
                return;
            }
        }
    }

    uint64_t least = 0;  // keys below are out
    if (limits_k)
        least =
            threshold(slice, static_cast<uint64_t>(s.top_k), team, [](int, float) -> uint64_t { return 1; });
    if (limits_p) {
        if (limits_k) {
            total = 0;
            slice.for_each([&](int id, float x) {
                if (token_key(x, id) >= least) total += scale.mass(x);
            });
            total = team.join<Sum>(total);
        }
        const uint64_t kept = threshold(slice, scale.target(total), team, [&](int id, float x) -> uint64_t {
            return token_key(x, id) >= least ? scale.mass(x) : 0;
        });
        if (kept > least) least = kept;
    }
    uint64_t best = 0;
    slice.for_each([&](int id, float x) {
        if (token_key(x, id) >= least) best = Greatest::join(best, scale.noisy_key(id, x, position));
    });
    best = team.join<Greatest>(best);
    if (writes) a.token[row] = key_id(best);
    ptx::cluster_sync();
}

template <bool Held>
__global__ void __launch_bounds__(kThreads, Held ? 2 : 1) top_k(const TopKArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    if (row >= live_rows(a.rows)) return;
    Space& space = *reinterpret_cast<Space*>(ptx::shared_memory());
    Team team{space, thread, thread / 32, thread % 32};
    const Slice<Held> slice(a.logits + static_cast<long long>(row) * a.vocab, a.vocab,
                            reinterpret_cast<float*>(&space + 1));
    int32_t* const token = a.token + static_cast<long long>(row) * a.k;
    float* const logp = a.logp + static_cast<long long>(row) * a.k;

    const RowScan scan = scan_row(slice, team);
    const float greatest = scan.has_finite ? key_logit(scan.greatest) : INFINITY;
    if (scan.has_nan || !(fabsf(greatest) < INFINITY)) {  // no distribution: says so, and names real tokens
        if (blockIdx.x == 0)
            for (int j = thread; j < a.k; j += kThreads) token[j] = j, logp[j] = NAN;
        ptx::cluster_sync();
        return;
    }
    const int bin = bin_of_rank(team, scan.mine, greatest, a.k);
    float sum = 0.0f;
    slice.for_each([&](int id, float x) {
        sum += expf(x - greatest);
        if (bin < kBins && bin_of(x, greatest) <= bin) list_candidate(space, token_key(x, id));
    });
    sum = block_sum(sum, space.sums);
    if (thread == 0) space.sums[kWarps] = sum;
    int listed = bin < kBins ? collect(team) : -1;
    if (listed < 0) {
        const uint64_t least =
            threshold(slice, static_cast<uint64_t>(a.k), team, [](int, float) -> uint64_t { return 1; });
        if (thread == 0) space.count = 0;
        __syncthreads();
        slice.for_each([&](int id, float x) {
            const uint64_t key = token_key(x, id);
            if (key >= least) list_candidate(space, key);
        });
        listed = collect(team);
    }
    if (blockIdx.x == 0) {
        float total = ptx::cluster_load(space.sums + kWarps, 0);
        for (uint32_t rank = 1; rank < kBlocks; ++rank) total += ptx::cluster_load(space.sums + kWarps, rank);
        const float log_sum = logf(total);
        for (int i = thread; i < a.k; i += kThreads) {
            const uint64_t key = space.list[i];
            token[i] = key_id(key);
            logp[i] = (key_logit(key) - greatest) - log_sum;
        }
    }
    ptx::cluster_sync();
}

// Whether a block's slice fits into its shared memory, and what a launch takes.
bool fits(int vocab) {
    return (vocab + kBlocks - 1) / kBlocks <= kHeld;
}

Launch launch_of(const GemmLaunch& l, int rows, int vocab) {
    const int held = fits(vocab) ? (vocab + kBlocks - 1) / kBlocks : 0;
    return {l.stream, l.device,
            l.name,   dim3(kBlocks, static_cast<unsigned>(rows)),
            kThreads, static_cast<int>(sizeof(Space)) + held * static_cast<int>(sizeof(float)),
            kBlocks};
}

}  // namespace

void launch_select(const GemmLaunch& l, const SelectArgs& args) {
    const Launch as = launch_of(l, args.rows.capacity, args.vocab);
    if (fits(args.vocab))
        launch<select<true>>(as, args);
    else
        launch<select<false>>(as, args);
}

void launch_top_k(const GemmLaunch& l, const TopKArgs& args) {
    const Launch as = launch_of(l, args.rows.capacity, args.vocab);
    if (fits(args.vocab))
        launch<top_k<true>>(as, args);
    else
        launch<top_k<false>>(as, args);
}

}  // namespace kdt::cuda
