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
// A row of the table in shared memory: its usable ranks, each token once, then infinities. One row more than
// the table has ends every chain of first children, another is read beside it. A multiple of 4 for int4.
constexpr int kRow = kMaxTableWidth + 4, kRows = kMaxTableDepth + 2;
constexpr int kPathWords = kMaxTableDepth / 4, kPathStride = kPathWords + 1;
constexpr int kPathSets = kMaxDraftPaths / 32;
static_assert(kMaxTableWidth == 64 && kMaxNodes == 64 && kMaxDraftPaths % 32 == 0);

struct Build {
    int32_t cell_token[kRows * kRow];
    double cell[kRows * kRow];  // magnitudes
    int32_t width[kRows];       // cells of a row

    // Popped table prefixes, the root 0: parent prefix << 16 | cell. Without paths these are the nodes.
    uint32_t prefix[kMaxTreeRows];
    uint32_t rank_path[kMaxTreeRows * kPathStride];  // a byte a depth, cell + 1, the first depth on top

    double node_weight[kMaxTreeRows];  // magnitudes
    int32_t node_token[kMaxTreeRows], node_parent[kMaxTreeRows], node_depth[kMaxTreeRows];
    int32_t node_source[kMaxTreeRows];
    int32_t in_row[kMaxTreeRows];
    int32_t count;

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

// Both values are there: registers have no address to choose from.
template <class T>
__device__ __forceinline__ T choose(bool second, T a, T b) {
    return second ? b : a;
}

// Row d of the table. One warp.
__device__ __forceinline__ void prepare_row(Build& b, int d, int width, int vocab, const int32_t (&token)[2],
                                            const float (&logp)[2], int lane) {
    int32_t* const row = b.cell_token + d * kRow;
    row[lane] = token[0];
    row[lane + 32] = token[1];
    // the entry before the first of the upper half stands in lane 31 of the lower
    const float before0 = __shfl_up_sync(kAll, logp[0], 1), last = __shfl_sync(kAll, logp[0], 31);
    const float up = __shfl_up_sync(kAll, logp[1], 1), before1 = lane == 0 ? last : up;
    const auto ok = [&](int r, int32_t t, float x, float before) {
        return r < width && t >= 0 && t < vocab && is_log_probability(x) && (r == 0 || x <= before);
    };
    const uint32_t ok0 = __ballot_sync(kAll, ok(lane, token[0], logp[0], before0));
    const uint32_t ok1 = __ballot_sync(kAll, ok(lane + 32, token[1], logp[1], before1));
    __syncwarp();
    bool first0 = true, first1 = true;
    for (int i = 0; i < width; i += 4) {
        const int4 t = *reinterpret_cast<const int4*>(row + i);
        const int32_t each[4] = {t.x, t.y, t.z, t.w};
        for (int j = 0; j < 4; ++j) {
            first0 = first0 && !(i + j < lane && each[j] == token[0]);
            first1 = first1 && !(i + j < lane + 32 && each[j] == token[1]);
        }
    }
    // the usable ranks are those before the first one that is not
    const uint32_t run0 = ok0 == kAll ? kAll : (1u << (__ffs(static_cast<int>(~ok0)) - 1)) - 1u;
    const uint32_t run1 = ok0 != kAll   ? 0u
                          : ok1 == kAll ? kAll
                                        : (1u << (__ffs(static_cast<int>(~ok1)) - 1)) - 1u;
    const uint32_t keep0 = __ballot_sync(kAll, first0) & run0, keep1 = __ballot_sync(kAll, first1) & run1;
    __syncwarp();  // every lane has read the row: it may take its tokens in their final places
    const uint32_t below = (1u << lane) - 1u;
    const int low = __popc(keep0), kept = low + __popc(keep1);
    double* const cell = b.cell + d * kRow;
    if (keep0 >> lane & 1) {
        const int at = __popc(keep0 & below);
        cell[at] = static_cast<double>(fabsf(logp[0]));
        row[at] = token[0];
    }
    if (keep1 >> lane & 1) {
        const int at = low + __popc(keep1 & below);
        cell[at] = static_cast<double>(fabsf(logp[1]));
        row[at] = token[1];
    }
    if (lane < 2) cell[kept + lane] = static_cast<double>(INFINITY);
    if (lane == 0) b.width[d] = kept;
    __syncwarp();
}

// The table's part of the frontier: lane l has the next child of prefixes l and l + 32, with what a pop of it
// will need: the candidates that follow are computed before they are asked for.
struct Slot {
    uint32_t high = kNobody, low = 0;             // magnitude of the candidate
    double parent = 0.0;                          // of the prefix
    int cell = 0, next_row = (kRows - 1) * kRow;  // the candidate; the row of its children
    double sibling = 0.0, child = 0.0;

    __device__ __forceinline__ void look_ahead(const Build& b) {
        sibling = parent + b.cell[cell + 1];
        child = as_double(high, low) + b.cell[next_row];
    }
};

// Rank paths of the prefixes up to `count`; those up to `known` stand already. One warp.
__device__ __forceinline__ void fill_rank_paths(Build& b, int known, int count, int lane) {
    for (int n = known + 1; n <= count; ++n) {
        __syncwarp();
        const uint32_t record = b.prefix[n];
        const int cell = static_cast<int>(record & 0xFFFF), d = cell / kRow, j = cell % kRow;
        if (lane < kPathWords) {
            uint32_t word = b.rank_path[static_cast<int>(record >> 16) * kPathStride + lane];
            if (d / 4 == lane) word |= static_cast<uint32_t>(j + 1) << (24 - d % 4 * 8);
            b.rank_path[n * kPathStride + lane] = word;
        }
    }
    __syncwarp();
}

// Of candidates whose weights are equal (bit l of `tied[s]`: that of prefix l + 32 s) leaves the one with the
// smallest rank path.
__device__ __forceinline__ void break_tie(const Build& b, const Slot (&slot)[2], uint32_t& tied0,
                                          uint32_t& tied1, int lane) {
    for (int w = 0; w < kPathWords; ++w) {
        uint32_t word[2];
#pragma unroll
        for (int s = 0; s < 2; ++s) {
            const int d = slot[s].cell / kRow, j = slot[s].cell % kRow;
            word[s] = kAll;
            if ((s == 0 ? tied0 : tied1) >> lane & 1) {
                word[s] = b.rank_path[(lane + 32 * s) * kPathStride + w];
                if (d / 4 == w) word[s] |= static_cast<uint32_t>(j + 1) << (24 - d % 4 * 8);
            }
        }
        const uint32_t least = __reduce_min_sync(kAll, word[0] < word[1] ? word[0] : word[1]);
        tied0 &= __ballot_sync(kAll, word[0] == least);
        tied1 &= __ballot_sync(kAll, word[1] == least);
        if (__popc(tied0) + __popc(tied1) == 1) return;
    }
}

// The warp that pops. `Sets`: halves of the slots in use.
struct Popper {
    Build& b;
    int lane;
    Slot slot[2];
    int known = 0;  // prefixes whose rank paths stand

    // Which slots hold the smallest magnitude, whose high half is `least`: one bit in all.
    template <int Sets>
    __device__ __forceinline__ void winners(uint32_t least, int prefixes, uint32_t& in0, uint32_t& in1) {
        in0 = __ballot_sync(kAll, slot[0].high == least);
        in1 = Sets > 1 ? __ballot_sync(kAll, slot[1].high == least) : 0u;
        if ((in0 & (in0 - 1)) == 0 && (in1 & (in1 - 1)) == 0 && (in0 == 0 || in1 == 0)) return;
        const uint32_t low0 = in0 >> lane & 1 ? slot[0].low : kAll,
                       low1 = in1 >> lane & 1 ? slot[1].low : kAll;
        const uint32_t low = __reduce_min_sync(kAll, low0 < low1 ? low0 : low1);
        in0 &= __ballot_sync(kAll, low0 == low);
        in1 &= __ballot_sync(kAll, low1 == low);
        if ((in0 & (in0 - 1)) == 0 && (in1 & (in1 - 1)) == 0 && (in0 == 0 || in1 == 0)) return;
        fill_rank_paths(b, known, prefixes, lane);
        known = prefixes;
        break_tie(b, slot, in0, in1, lane);
    }

    // Pops the winner (of prefix `lead` + 32 * `second`, its magnitude's upper half `high`): its slot goes on
    // to the sibling, slot `prefix` begins with the first child.
    template <int Sets>
    __device__ __forceinline__ void advance(int lead, bool second, int prefix, uint32_t high,
                                            double* node_weight) {
        const bool upper = Sets > 1 && second;
        const double child = choose(upper, slot[0].child, slot[1].child);
        const uint32_t child_high = __shfl_sync(kAll, high_half(child), lead);
        const uint32_t child_low = __shfl_sync(kAll, low_half(child), lead);
        const uint32_t my_low = choose(upper, slot[0].low, slot[1].low);
        const uint32_t low = __shfl_sync(kAll, my_low, lead);
        const int row = __shfl_sync(kAll, choose(upper, slot[0].next_row, slot[1].next_row), lead);
        const int cell = choose(upper, slot[0].cell, slot[1].cell);
        if (lane == lead) {
            b.prefix[prefix] =
                static_cast<uint32_t>(lead + (upper ? 32 : 0)) << 16 | static_cast<uint32_t>(cell);
            if (node_weight != nullptr) node_weight[prefix] = as_double(high, my_low);
        }
        Slot& to = slot[Sets - 1];
#pragma unroll
        for (int s = 0; s < Sets; ++s)
            if (lane == lead && upper == (s == 1)) {
                slot[s].high = high_half(slot[s].sibling);
                slot[s].low = low_half(slot[s].sibling);
                ++slot[s].cell;
            }
        if (lane == prefix - 32 * (Sets - 1)) {
            to.high = child_high;
            to.low = child_low;
            to.parent = as_double(high, low);
            to.cell = row;
            to.next_row = min(row + kRow, (kRows - 1) * kRow);
        }
#pragma unroll
        for (int s = 0; s < Sets; ++s) slot[s].look_ahead(b);
    }

    template <int Sets>
    __device__ __forceinline__ uint32_t least() const {
        const uint32_t a = slot[0].high, c = Sets > 1 ? slot[1].high : kNobody;
        return __reduce_min_sync(kAll, c < a ? c : a);
    }

    // From the table alone, every prefix is a node. Pops until there are `limit` nodes; false: none are left.
    template <int Sets>
    __device__ __forceinline__ bool pop_table(int& count, int limit) {
        while (count < limit) {
            const uint32_t high = least<Sets>();
            if (high >= kNobody) return false;
            uint32_t in0, in1;
            winners<Sets>(high, count, in0, in1);
            const bool second = Sets > 1 && in0 == 0;
            const int lead = __ffs(static_cast<int>(second ? in1 : in0)) - 1;
            ++count;
            advance<Sets>(lead, second, count, high, b.node_weight);
        }
        return true;
    }
};

// Table and paths together: a candidate may be a node that stands already, so prefixes and nodes differ.
struct MergedPopper {
    Popper table;
    const float* step_weight;  // [max_paths, kMaxDepth]
    const int32_t* step_token;
    int owner[2] = {0, 0};  // nodes of the slots' prefixes
    uint32_t high[kPathSets] = {}, low[kPathSets] = {};
    int node[kPathSets] = {}, depth[kPathSets] = {},
        length[kPathSets] = {};                     // of path lane + 32 k: its next step
    int parent[2] = {-2, -2}, token[2] = {-1, -1};  // of nodes lane and lane + 32

    __device__ __forceinline__ int take(int& count, int from, int depth_, int32_t token_, double weight) {
        const int lane = table.lane;
        const uint32_t hit0 = __ballot_sync(kAll, parent[0] == from && token[0] == token_);
        const uint32_t hit1 = __ballot_sync(kAll, parent[1] == from && token[1] == token_);
        if (hit0 != 0) return __ffs(static_cast<int>(hit0)) - 1;
        if (hit1 != 0) return __ffs(static_cast<int>(hit1)) + 31;
        ++count;
        if (lane == 0) {
            table.b.node_token[count] = token_;
            table.b.node_parent[count] = from;
            table.b.node_depth[count] = depth_;
            table.b.node_weight[count] = weight;
        }
        if (lane == count % 32 && count < kMaxNodes) {
            const bool upper = count >= 32;
            parent[0] = upper ? parent[0] : from;
            token[0] = upper ? token[0] : token_;
            parent[1] = upper ? from : parent[1];
            token[1] = upper ? token_ : token[1];
        }
        return count;
    }

    __device__ __forceinline__ int pop(int budget) {
        Build& b = table.b;
        const int lane = table.lane;
        int count = 0, prefixes = 0;
        while (count < budget) {
            uint32_t mine = table.slot[0].high < table.slot[1].high ? table.slot[0].high : table.slot[1].high;
#pragma unroll
            for (int k = 0; k < kPathSets; ++k) mine = high[k] < mine ? high[k] : mine;
            const uint32_t least_high = __reduce_min_sync(kAll, mine);
            if (least_high >= kNobody) break;
            mine = kAll;
#pragma unroll
            for (int s = 0; s < 2; ++s)
                if (table.slot[s].high == least_high && table.slot[s].low < mine) mine = table.slot[s].low;
#pragma unroll
            for (int k = 0; k < kPathSets; ++k)
                if (high[k] == least_high && low[k] < mine) mine = low[k];
            const uint32_t least_low = __reduce_min_sync(kAll, mine);
            const double weight = as_double(least_high, least_low);
            uint32_t in0 =
                __ballot_sync(kAll, table.slot[0].high == least_high && table.slot[0].low == least_low);
            uint32_t in1 =
                __ballot_sync(kAll, table.slot[1].high == least_high && table.slot[1].low == least_low);
            if ((in0 | in1) != 0) {
                if (__popc(in0) + __popc(in1) > 1) {
                    fill_rank_paths(b, table.known, prefixes, lane);
                    table.known = prefixes;
                    break_tie(b, table.slot, in0, in1, lane);
                }
                const bool second = in0 == 0;
                const int lead = __ffs(static_cast<int>(second ? in1 : in0)) - 1;
                const int cell =
                    __shfl_sync(kAll, choose(second, table.slot[0].cell, table.slot[1].cell), lead);
                const int from = __shfl_sync(kAll, choose(second, owner[0], owner[1]), lead);
                const int at = take(count, from, cell / kRow + 1, b.cell_token[cell], weight);
                ++prefixes;
                if (prefixes < 32)
                    table.advance<1>(lead, second, prefixes, least_high, nullptr);
                else
                    table.advance<2>(lead, second, prefixes, least_high, nullptr);
                if (lane == prefixes % 32) {
                    owner[0] = prefixes < 32 ? at : owner[0];
                    owner[1] = prefixes >= 32 && prefixes < 64 ? at : owner[1];
                }
                continue;
            }
            int lead = -1, set = 0;  // the lowest path among those of this weight
#pragma unroll
            for (int k = kPathSets - 1; k >= 0; --k) {
                const uint32_t in = __ballot_sync(kAll, high[k] == least_high && low[k] == least_low);
                if (in != 0) lead = __ffs(static_cast<int>(in)) - 1, set = k;
            }
            int mine_node = node[0], mine_depth = depth[0];
#pragma unroll
            for (int k = 1; k < kPathSets; ++k)
                if (set == k) mine_node = node[k], mine_depth = depth[k];
            const int from = __shfl_sync(kAll, mine_node, lead), d = __shfl_sync(kAll, mine_depth, lead);
            const int step = (lead + 32 * set) * kMaxDepth + d - 1;
            const int at = take(count, from, d, step_token[step], weight);
#pragma unroll
            for (int k = 0; k < kPathSets; ++k)
                if (lane == lead && set == k) {
                    double next = static_cast<double>(INFINITY);
                    if (d < length[k]) next = weight + static_cast<double>(step_weight[step + 1]);
                    high[k] = high_half(next);
                    low[k] = low_half(next);
                    node[k] = at;
                    depth[k] = d + 1;
                }
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

template <bool Paths>
__global__ void __launch_bounds__(kThreads, 1) build_tree(const BuildTreeArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    Build& b = *reinterpret_cast<Build*>(ptx::shared_memory());
    float* const step_weight = reinterpret_cast<float*>(&b + 1);
    int32_t* const step_token = reinterpret_cast<int32_t*>(step_weight + a.proposal.max_paths * kMaxDepth);
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
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
    for (int d = table_rows + thread; d < kRows; d += kThreads) {
        b.cell[d * kRow] = b.cell[d * kRow + 1] = static_cast<double>(INFINITY);
        b.width[d] = 0;
    }
    if (Paths)
        for (int q = warp; q < paths; q += kWarps) prepare_path(b, a, q, step_weight, step_token, lane);
    if (thread < kPathWords) b.rank_path[thread] = 0;
    if (thread == 0) {
        b.node_token[0] = root;
        b.node_parent[0] = -1;
        b.node_depth[0] = 0;
        b.node_weight[0] = 0.0;
    }
    __syncthreads();

    if (warp == 0) {
        int count = 0;
        Popper table{b, lane, {}, 0};
        if (lane == 0) {
            table.slot[0].high = high_half(b.cell[0]);
            table.slot[0].low = low_half(b.cell[0]);
            table.slot[0].next_row = kRow;
        }
        table.slot[0].look_ahead(b);
        table.slot[1].look_ahead(b);
        if (!Paths) {
            // prefix n has slot n; what node 64 leads to is not asked for
            if (table.pop_table<1>(count, min(a.budget, 31))) table.pop_table<2>(count, a.budget);
        } else {
            MergedPopper merged{.table = table, .step_weight = step_weight, .step_token = step_token};
#pragma unroll
            for (int k = 0; k < kPathSets; ++k) {
                const int q = lane + 32 * k;
                merged.length[k] = q < paths ? min(b.path_length[q], a.max_depth) : 0;
                const double first = merged.length[k] > 0 ? static_cast<double>(step_weight[q * kMaxDepth])
                                                          : static_cast<double>(INFINITY);
                merged.high[k] = high_half(first);
                merged.low[k] = low_half(first);
                merged.node[k] = 0;
                merged.depth[k] = 1;
            }
            count = merged.pop(a.budget);
        }
        if (lane == 0) b.count = count;
    }
    __syncthreads();

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
            const int cell = static_cast<int>(b.prefix[i] & 0xFFFF);
            node_token = b.cell_token[cell];
            parent = static_cast<int32_t>(b.prefix[i] >> 16);
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
    if (paths)
        launch<build_tree<true>>(as, args);
    else
        launch<build_tree<false>>(as, args);
}

}  // namespace kdt::cuda
