// The next token of each row: greedy, or the winner of the noise among those that top_k, top_p and min_p keep
// (docs/kernels/sampling.md).
#include "backend/cuda/sampling_candidates.cuh"
#include "backend/cuda/sampling_noise.cuh"

namespace kdt::cuda {

namespace {

using namespace sampling;

constexpr int kNucleusRanks = 256;  // candidates from which top_p without top_k is tried

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

}  // namespace

void launch_select(const GemmLaunch& l, const SelectArgs& args) {
    const Launch as = launch_of(l, args.rows.capacity, args.vocab);
    if (fits(args.vocab))
        launch<select<true>>(as, args);
    else
        launch<select<false>>(as, args);
}

}  // namespace kdt::cuda
