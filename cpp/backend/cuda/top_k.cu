// The k most probable tokens of each row with their log-probabilities, for drafters
// (docs/kernels/sampling.md).
#include "backend/cuda/sampling_candidates.cuh"

namespace kdt::cuda {

namespace {

using namespace sampling;

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

}  // namespace

void launch_top_k(const GemmLaunch& l, const TopKArgs& args) {
    const Launch as = launch_of(l, args.rows.capacity, args.vocab);
    if (fits(args.vocab))
        launch<top_k<true>>(as, args);
    else
        launch<top_k<false>>(as, args);
}

}  // namespace kdt::cuda
