// Eight blocks (a cluster) share a row of logits, each with a fixed slice of the vocabulary.
//
// Tokens are ordered by a 64-bit key: the logit, order-preserving, above the complement of the id; so no two
// tokens tie. "The k greatest" and "the fewest whose mass reaches a limit" are then a threshold, found digit
// by digit. Counts and masses are integers (mass: exp(z) in units of 2^-40), whose sums have no order.
#include "backend/cuda/sampling.h"

#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kBlocks = 8;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kJoinWords = (kWarps + 1) * 3;
constexpr float kMassUnit = 1099511627776.0f;  // 2^40

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

__device__ __forceinline__ uint64_t shuffle_xor(uint64_t x, int offset) {
    const uint32_t low = __shfl_xor_sync(0xFFFFFFFFu, static_cast<uint32_t>(x), offset);
    const uint32_t high = __shfl_xor_sync(0xFFFFFFFFu, static_cast<uint32_t>(x >> 32), offset);
    return static_cast<uint64_t>(high) << 32 | low;
}

struct Sum {
    static __device__ __forceinline__ uint64_t join(uint64_t a, uint64_t b) { return a + b; }
};
struct Greatest {
    static __device__ __forceinline__ uint64_t join(uint64_t a, uint64_t b) { return a > b ? a : b; }
};

// N values of every thread of the cluster, joined; every thread gets the result. `scratch`: kJoinWords words.
template <class Op, int N>
__device__ __forceinline__ void cluster_join(uint64_t (&x)[N], uint64_t* scratch) {
    uint64_t* const mine = scratch + kWarps * N;
    for (int i = 0; i < N; ++i) {
        for (int offset = 16; offset > 0; offset >>= 1) x[i] = Op::join(x[i], shuffle_xor(x[i], offset));
        if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32 * N + i] = x[i];
    }
    __syncthreads();
    if (threadIdx.x < N) {
        uint64_t sum = scratch[threadIdx.x];
        for (int w = 1; w < kWarps; ++w) sum = Op::join(sum, scratch[w * N + static_cast<int>(threadIdx.x)]);
        mine[threadIdx.x] = sum;
    }
    ptx::cluster_sync();
    for (int i = 0; i < N; ++i) {
        const uint32_t* word = reinterpret_cast<const uint32_t*>(mine + i);
        for (uint32_t rank = 0; rank < kBlocks; ++rank) {
            const uint64_t other = static_cast<uint64_t>(ptx::cluster_load_word(word + 1, rank)) << 32 |
                                   ptx::cluster_load_word(word, rank);
            x[i] = rank == 0 ? other : Op::join(x[i], other);
        }
    }
    ptx::cluster_sync();
}

template <class Op>
__device__ __forceinline__ uint64_t cluster_join(uint64_t x, uint64_t* scratch) {
    uint64_t one[1] = {x};
    cluster_join<Op, 1>(one, scratch);
    return one[0];
}

// A block's share of one row.
struct Slice {
    const float* x;
    int begin, end;

    __device__ __forceinline__ Slice(const float* row, int vocab) : x(row) {
        const int each = (vocab + kBlocks - 1) / kBlocks;
        begin = min(static_cast<int>(blockIdx.x) * each, vocab);
        end = min(begin + each, vocab);
    }

    template <class F>
    __device__ __forceinline__ void for_each(const F& f) const {
#pragma unroll 4
        for (int id = begin + static_cast<int>(threadIdx.x); id < end; id += kThreads)
            f(id, load_activation(x + id));
    }
};

// The greatest key T with (sum of weight(id, x) over tokens with key >= T) >= target; at least one token
// reaches it.
template <class Weight>
__device__ __forceinline__ uint64_t threshold(const Slice& slice, uint64_t target, uint64_t* scratch,
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
        cluster_join<Sum, 3>(sum, scratch);
        for (int i = 0; i < 3; ++i)
            if (sum[i] >= target) found += digit;
    }
    return found;
}

struct RowScan {
    uint64_t greatest;  // key
    bool has_nan, has_finite;
};

__device__ __forceinline__ RowScan scan_row(const Slice& slice, uint64_t* scratch) {
    uint64_t greatest = 0, flags = 0;
    slice.for_each([&](int id, float x) {
        if (x != x) {
            flags |=
                1;  // joined as sums: the low half counts threads that saw a NaN, the high half finite values
            return;
        }
        if (fabsf(x) < INFINITY) flags |= 1ull << 32;
        greatest = Greatest::join(greatest, token_key(x, id));
    });
    const uint64_t found = cluster_join<Sum>(flags, scratch);
    return {cluster_join<Greatest>(greatest, scratch), static_cast<uint32_t>(found) != 0, found >> 32 != 0};
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

__global__ void __launch_bounds__(kThreads, 1) select(const SelectArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.y);
    if (row >= live_rows(a.rows)) return;
    uint64_t* const scratch = reinterpret_cast<uint64_t*>(ptx::shared_memory());
    const Slice slice(a.logits + static_cast<long long>(row) * a.vocab, a.vocab);
    const RowScan scan = scan_row(slice, scratch);
    const bool writes = blockIdx.x == 0 && threadIdx.x == 0;
    if (scan.has_nan || !scan.has_finite) {
        if (writes) a.token[row] = -1;
        return;
    }
    const SampleParams s = *a.sample;
    const int argmax = key_id(scan.greatest);
    if (s.temperature == 0.0f) {
        if (writes) a.token[row] = argmax;
        return;
    }

    const float greatest = load_activation(slice.x + argmax);
    const auto z_of = [&](float x) { return x == greatest ? 0.0f : (x - greatest) / s.temperature; };
    const auto mass = [&](float x) { return __float2ull_rn(expf(z_of(x)) * kMassUnit); };
    uint64_t least = 0;  // keys below are out
    if (s.top_k > 0 && s.top_k < a.vocab)
        least = threshold(slice, static_cast<uint64_t>(s.top_k), scratch,
                          [](int, float) -> uint64_t { return 1; });
    if (s.top_p < 1.0f) {
        uint64_t sum = 0;
        slice.for_each([&](int id, float x) {
            if (token_key(x, id) >= least) sum += mass(x);
        });
        const double total = static_cast<double>(cluster_join<Sum>(sum, scratch));
        const double limit = ceil(static_cast<double>(s.top_p) * total);
        const uint64_t target = limit < 1.0 ? 1 : static_cast<uint64_t>(limit);
        const uint64_t kept = threshold(slice, target, scratch, [&](int id, float x) -> uint64_t {
            return token_key(x, id) >= least ? mass(x) : 0;
        });
        if (kept > least) least = kept;
    }
    const uint32_t position = static_cast<uint32_t>(a.position[row]) + 1;
    uint64_t best = 0;
    slice.for_each([&](int id, float x) {
        if (token_key(x, id) < least) return;
        const float z = z_of(x);
        if (s.min_p > 0.0f && !(expf(z) >= s.min_p)) return;
        best = Greatest::join(best, token_key(z + gumbel(s, static_cast<uint32_t>(id), position), id));
    });
    best = cluster_join<Greatest>(best, scratch);
    if (writes) a.token[row] = key_id(best);
}

__global__ void __launch_bounds__(kThreads, 1) top_k(const TopKArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.y), thread = static_cast<int>(threadIdx.x);
    if (row >= live_rows(a.rows)) return;
    uint64_t* const scratch = reinterpret_cast<uint64_t*>(ptx::shared_memory());
    uint64_t* const mine = scratch + kJoinWords;  // [kMaxTopTokens] this block's
    uint64_t* const all = mine + kMaxTopTokens;   // [kMaxTopTokens] everyone's, in block 0
    float* const sums = reinterpret_cast<float*>(all + kMaxTopTokens);  // [kWarps], then the block's sum
    int32_t* const count = reinterpret_cast<int32_t*>(sums + kWarps + 1);
    const Slice slice(a.logits + static_cast<long long>(row) * a.vocab, a.vocab);
    int32_t* const token = a.token + static_cast<long long>(row) * a.k;
    float* const logp = a.logp + static_cast<long long>(row) * a.k;

    const RowScan scan = scan_row(slice, scratch);
    const float greatest = scan.has_finite ? load_activation(slice.x + key_id(scan.greatest)) : INFINITY;
    if (scan.has_nan || !(fabsf(greatest) < INFINITY)) {  // no distribution: says so, and names real tokens
        if (blockIdx.x == 0)
            for (int j = thread; j < a.k; j += kThreads) token[j] = j, logp[j] = NAN;
        return;
    }
    const uint64_t least =
        threshold(slice, static_cast<uint64_t>(a.k), scratch, [](int, float) -> uint64_t { return 1; });
    if (thread == 0) *count = 0;
    __syncthreads();
    float sum = 0.0f;
    slice.for_each([&](int id, float x) {
        sum += expf(x - greatest);
        const uint64_t key = token_key(x, id);
        if (key >= least) mine[atomicAdd(count, 1)] = key;
    });
    sum = block_sum(sum, sums);
    if (thread == 0) sums[kWarps] = sum;
    ptx::cluster_sync();
    if (blockIdx.x == 0) {
        float total = ptx::cluster_load(sums + kWarps, 0);
        for (uint32_t rank = 1; rank < kBlocks; ++rank) total += ptx::cluster_load(sums + kWarps, rank);
        const float log_sum = logf(total);
        int before = 0;
        for (uint32_t rank = 0; rank < kBlocks; ++rank) {
            const int n = static_cast<int>(ptx::cluster_load_word(count, rank));
            for (int i = thread; i < 2 * n; i += kThreads)
                reinterpret_cast<uint32_t*>(all + before)[i] =
                    ptx::cluster_load_word(reinterpret_cast<const uint32_t*>(mine) + i, rank);
            before += n;
        }
        __syncthreads();
        for (int i = thread; i < a.k; i += kThreads) {
            int rank = 0;
            for (int j = 0; j < a.k; ++j) rank += all[j] > all[i];
            const int id = key_id(all[i]);
            token[rank] = id;
            logp[rank] = (load_activation(slice.x + id) - greatest) - log_sum;
        }
    }
    ptx::cluster_sync();
}

}  // namespace

void launch_select(const GemmLaunch& l, const SelectArgs& args) {
    launch<select>({l.stream, l.device, l.name, dim3(kBlocks, static_cast<unsigned>(args.rows.capacity)),
                    kThreads, kJoinWords * 8, kBlocks},
                   args);
}

void launch_top_k(const GemmLaunch& l, const TopKArgs& args) {
    launch<top_k>({l.stream, l.device, l.name, dim3(kBlocks, static_cast<unsigned>(args.rows.capacity)),
                   kThreads, kJoinWords * 8 + 2 * kMaxTopTokens * 8 + (kWarps + 2) * 4, kBlocks},
                  args);
}

}  // namespace kdt::cuda
