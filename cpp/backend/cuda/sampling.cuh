// What `select` and `top_k` share: the order of tokens, the cluster of a row, a block's slice of it.
//
//   logits of a row   [ block 0 | block 1 | ... | block 7 ]
//
// The blocks are one cluster. Each reads its slice once and holds it in shared memory, where it fits.
//
// Tokens are ordered by a 64-bit key: the logit, order-preserving, above the complement of the id; so no two
// tokens tie. "The k greatest" and "the fewest whose mass reaches a limit" are then sets that the keys fix.
// Counts and masses are integers, whose sums have no order. So there may be two ways to a set, a quick one
// that lists a few candidates and one that always works (sampling_candidates.cuh), and no bit tells which it
// was.
#pragma once

#include "backend/cuda/launch.h"
#include "backend/cuda/sampling.h"

namespace kdt::cuda::sampling {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr int kBlocks = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kHeld = 20480;       // logits of a slice that fit into shared memory: vocabularies to 163,840
constexpr int kCandidates = 2048;  // of a row
constexpr int kMostRanks = 1024;   // that are looked for in a list of candidates
constexpr int kBins = 256;
constexpr uint64_t kNan = ~0ull;  // above every key

// Shared memory of a block.
struct Space {
    uint64_t join[2][kWarps * 3];
    uint64_t list[kCandidates];  // this block's candidates; in block 0 at last everyone's, best first
    uint64_t warp_sum[kWarps];
    uint32_t bins[kBins];
    float sums[kWarps + 1];
    int32_t count;  // of this block's candidates
    int32_t kept;   // in block 0: of everyone's; -1: they do not suffice
    // behind this struct: the slice's logits, float [kHeld]
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

// Whether a block's slice fits into its shared memory, and what a launch takes.
inline bool fits(int vocab) {
    return (vocab + kBlocks - 1) / kBlocks <= kHeld;
}

inline Launch launch_of(const GemmLaunch& l, int rows, int vocab) {
    const int held = fits(vocab) ? (vocab + kBlocks - 1) / kBlocks : 0;
    return {l.stream, l.device,
            l.name,   dim3(kBlocks, static_cast<unsigned>(rows)),
            kThreads, static_cast<int>(sizeof(Space)) + held * static_cast<int>(sizeof(float)),
            kBlocks};
}

}  // namespace kdt::cuda::sampling
