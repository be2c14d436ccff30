// The tree ops: the algorithms of cpp/ddtree, in one launch each (docs/kernels/tree.md). Integers and float64
// sums in a fixed order: the results are those of the host's code, bit for bit.
#include "backend/cuda/tree.h"

#include "backend/cuda/device.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 128;
constexpr int kSlots = 288;  // frontier: 1 + kMaxDraftPaths + 2 per node at most
constexpr int kPathWords = kMaxTableDepth / 8;
static_assert(1 + kMaxDraftPaths + 2 * kMaxNodes < kSlots);
static_assert(kMaxTableWidth <= 64);

// The frontier and the tree in shared memory.
struct Build {
    float logp[kMaxTableDepth][kMaxTableWidth];
    int32_t token[kMaxTableDepth][kMaxTableWidth];
    uint64_t fresh[kMaxTableDepth];  // bit r: rank r is usable and its token stands at no earlier rank
    int32_t run[kMaxTableDepth];     // usable ranks: the first `run`

    uint64_t key[kSlots];  // order-preserving form of the weight; 0: empty
    double weight[kSlots];
    double parent_weight[kSlots];            // float64 sum of the rank path without its last step
    uint64_t rank_path[kSlots][kPathWords];  // a byte a depth, rank + 1, the first depth in the top byte
    int32_t path[kSlots];                    // -1: from the table
    int32_t parent[kSlots];
    int32_t depth[kSlots];
    int32_t rank[kSlots];

    double node_weight[kMaxTreeRows];
    int32_t node_token[kMaxTreeRows], node_parent[kMaxTreeRows], node_depth[kMaxTreeRows];
    int32_t node_source[kMaxTreeRows];
    int32_t in_row[kMaxTreeRows];
    int32_t count;
};

__device__ __forceinline__ bool is_log_probability(float x) {
    return x <= 0.0f && x > -INFINITY;
}

// Larger for larger weights, never 0. Weights are sums of non-positive floats, so never -0.
__device__ __forceinline__ uint64_t weight_key(double w) {
    const uint64_t bits = static_cast<uint64_t>(__double_as_longlong(w));
    return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// Order among candidates of equal weight: table before paths, smaller rank path, lower path index.
__device__ __forceinline__ bool comes_first(const Build& b, int x, int y) {
    if (b.path[x] != b.path[y]) return b.path[x] < b.path[y];
    for (int i = 0; i < kPathWords; ++i)
        if (b.rank_path[x][i] != b.rank_path[y][i]) return b.rank_path[x][i] < b.rank_path[y][i];
    return false;
}

// One warp owns the frontier: lane l the slots l, l + 32, ..., of which it remembers the best.
struct Frontier {
    Build& b;
    int lane, slots = 0;
    uint64_t best_key = 0;
    int best_slot = -1;

    __device__ void rescan() {
        best_key = 0;
        best_slot = -1;
        for (int s = lane; s < slots; s += 32)
            if (b.key[s] > best_key ||
                (b.key[s] != 0 && b.key[s] == best_key && comes_first(b, s, best_slot))) {
                best_key = b.key[s];
                best_slot = s;
            }
    }

    // The slot of the heaviest candidate; -1 where there is none. The same in every lane.
    __device__ int top() const {
        const uint32_t high = __reduce_max_sync(0xFFFFFFFFu, static_cast<uint32_t>(best_key >> 32));
        if (high == 0) return -1;  // every key of a candidate has a bit there
        const bool near = static_cast<uint32_t>(best_key >> 32) == high;
        const uint32_t low = __reduce_max_sync(0xFFFFFFFFu, near ? static_cast<uint32_t>(best_key) : 0u);
        uint32_t ties = __ballot_sync(0xFFFFFFFFu, near && static_cast<uint32_t>(best_key) == low);
        int slot = __shfl_sync(0xFFFFFFFFu, best_slot, __ffs(static_cast<int>(ties)) - 1);
        for (ties &= ties - 1; ties != 0; ties &= ties - 1) {
            const int other = __shfl_sync(0xFFFFFFFFu, best_slot, __ffs(static_cast<int>(ties)) - 1);
            if (comes_first(b, other, slot)) slot = other;
        }
        return slot;
    }
};

__device__ __forceinline__ int child_with_token(const Build& b, int count, int parent, int32_t token) {
    for (int i = parent + 1; i <= count; ++i)
        if (b.node_parent[i] == parent && b.node_token[i] == token) return i;
    return -1;
}

// Usable ranks of table row d and which of them are the first with their token. One warp.
__device__ void prepare_row(Build& b, const ProposalArrays& p, int d, int lane) {
    for (int r = lane; r < p.table_width; r += 32) {
        b.token[d][r] = __ldcg(p.table_token + d * p.table_width + r);
        b.logp[d][r] = __ldcg(p.table_logp + d * p.table_width + r);
    }
    __syncwarp();
    uint64_t usable = 0, fresh = 0;
    int32_t low_token = -1;
    for (int half = 0; half * 32 < p.table_width; ++half) {
        const int r = half * 32 + lane;
        const int32_t token = r < p.table_width ? b.token[d][r] : -1;
        const bool ok =
            token >= 0 && is_log_probability(b.logp[d][r]) && (r == 0 || b.logp[d][r] <= b.logp[d][r - 1]);
        bool first = (__match_any_sync(0xFFFFFFFFu, token) & ((1u << lane) - 1u)) == 0;
        if (half == 0)
            low_token = token;
        else
            for (int i = 0; i < 32; ++i) first &= __shfl_sync(0xFFFFFFFFu, low_token, i) != token;
        usable |= static_cast<uint64_t>(__ballot_sync(0xFFFFFFFFu, ok)) << (32 * half);
        fresh |= static_cast<uint64_t>(__ballot_sync(0xFFFFFFFFu, first)) << (32 * half);
    }
    const int run = ~usable == 0 ? 64 : __ffsll(static_cast<long long>(~usable)) - 1;
    if (lane == 0) {
        b.run[d] = run;
        b.fresh[d] = run == 64 ? fresh : fresh & ((1ull << run) - 1);
    }
}

// The first rank from `rank` on that may become a candidate at depth d + 1; -1 where there is none.
__device__ __forceinline__ int next_rank(const Build& b, int d, int rank) {
    const uint64_t rest = rank >= 64 ? 0 : b.fresh[d] >> rank << rank;
    return rest == 0 ? -1 : __ffsll(static_cast<long long>(rest)) - 1;
}

__global__ void __launch_bounds__(kThreads) build_tree(const BuildTreeArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    Build& b = *reinterpret_cast<Build*>(ptx::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const ProposalArrays& p = a.proposal;
    const int table_depth = p.table_depth == nullptr || p.table_width < 1
                                ? 0
                                : min(max(__ldcg(p.table_depth), 0), kMaxTableDepth);
    const int paths = p.path_count == nullptr ? 0 : min(max(__ldcg(p.path_count), 0), p.max_paths);
    const int usable_depth = min(table_depth, a.max_depth);
    for (int d = warp; d < table_depth; d += kThreads / 32) prepare_row(b, p, d, lane);
    __syncthreads();

    const auto path_at = [&](int path, int depth) { return path * kMaxDepth + depth - 1; };
    const auto path_step = [&](int path, int depth) {  // whether the path has a usable step at this depth
        return depth <= min(__ldcg(p.path_length + path), kMaxDepth) && depth <= a.max_depth &&
               is_log_probability(__ldcg(p.path_logp + path_at(path, depth))) &&
               __ldcg(p.path_token + path_at(path, depth)) >= 0;
    };

    if (warp == 0) {
        int count = 0;
        if (lane == 0) {
            b.node_token[0] = __ldcg(a.root);
            b.node_parent[0] = -1;
            b.node_depth[0] = 0;
            b.node_weight[0] = 0.0;
        }
        Frontier f{b, lane};
        const int first = usable_depth >= 1 ? next_rank(b, 0, 0) : -1;
        if (first >= 0) {
            if (lane == 0) {
                b.parent_weight[0] = 0.0;
                b.weight[0] = 0.0 + static_cast<double>(b.logp[0][first]);
                b.key[0] = weight_key(b.weight[0]);
                for (int i = 0; i < kPathWords; ++i) b.rank_path[0][i] = 0;
                b.rank_path[0][0] = static_cast<uint64_t>(first + 1) << 56;
                b.path[0] = -1;
                b.parent[0] = 0;
                b.depth[0] = 1;
                b.rank[0] = first;
            }
            f.slots = 1;
        }
        for (int q = lane; q < paths; q += 32) {
            const int s = f.slots + q;
            b.key[s] = 0;
            if (path_step(q, 1)) {
                b.weight[s] = 0.0 + static_cast<double>(__ldcg(p.path_logp + path_at(q, 1)));
                b.key[s] = weight_key(b.weight[s]);
                b.path[s] = q;
                b.parent[s] = 0;
                b.depth[s] = 1;
            }
        }
        f.slots += paths;
        __syncwarp();
        f.rescan();

        while (count < a.budget) {
            const int s = f.top();
            if (s < 0) break;
            const int path = b.path[s], parent = b.parent[s], depth = b.depth[s], rank = b.rank[s];
            const double weight = b.weight[s], parent_weight = b.parent_weight[s];
            const int32_t token =
                path < 0 ? b.token[depth - 1][rank] : __ldcg(p.path_token + path_at(path, depth));
            // Without paths every candidate is a prefix of its own.
            int node = paths > 0 ? child_with_token(b, count, parent, token) : -1;
            if (node < 0) {
                node = ++count;
                if (lane == 0) {
                    b.node_token[node] = token;
                    b.node_parent[node] = parent;
                    b.node_depth[node] = depth;
                    b.node_weight[node] = weight;
                }
            }
            int added = -1;
            if (path >= 0) {
                const bool more = path_step(path, depth + 1);
                __syncwarp();
                if (lane == 0) {
                    b.key[s] = 0;
                    if (more) {
                        b.weight[s] =
                            weight + static_cast<double>(__ldcg(p.path_logp + path_at(path, depth + 1)));
                        b.key[s] = weight_key(b.weight[s]);
                        b.parent[s] = node;
                        b.depth[s] = depth + 1;
                    }
                }
            } else {
                const int sibling = next_rank(b, depth - 1, rank + 1);
                const int child = depth < usable_depth ? next_rank(b, depth, 0) : -1;
                if (child >= 0) added = f.slots++;
                __syncwarp();
                if (lane < kPathWords) {
                    const uint64_t word = b.rank_path[s][lane];
                    const auto step = [&](int at,
                                          int r) -> uint64_t {  // byte of depth `at` in this lane's word
                        return (at - 1) / 8 == lane ? static_cast<uint64_t>(r + 1) << (56 - (at - 1) % 8 * 8)
                                                    : 0;
                    };
                    if (child >= 0) b.rank_path[added][lane] = word | step(depth + 1, child);
                    if (sibling >= 0) b.rank_path[s][lane] = word - step(depth, rank) + step(depth, sibling);
                }
                if (lane == 0) {
                    b.key[s] = 0;
                    if (child >= 0) {
                        b.parent_weight[added] = weight;
                        b.weight[added] = weight + static_cast<double>(b.logp[depth][child]);
                        b.key[added] = weight_key(b.weight[added]);
                        b.path[added] = -1;
                        b.parent[added] = node;
                        b.depth[added] = depth + 1;
                        b.rank[added] = child;
                    }
                    if (sibling >= 0) {
                        b.weight[s] = parent_weight + static_cast<double>(b.logp[depth - 1][sibling]);
                        b.key[s] = weight_key(b.weight[s]);
                        b.rank[s] = sibling;
                    }
                }
            }
            __syncwarp();
            if (s % 32 == lane || (added >= 0 && added % 32 == lane)) f.rescan();
        }
        if (lane == 0) b.count = count;
    }
    __syncthreads();

    // Sources: everyone who proposes a node, whether or not their candidate came up.
    const int count = b.count;
    for (int i = thread; i <= count; i += kThreads) {
        const int d = b.node_depth[i] - 1;
        bool hit = i == 0;
        if (i > 0 && d < table_depth)
            for (int r = 0; r < b.run[d] && !hit; ++r) hit = b.token[d][r] == b.node_token[i];
        b.in_row[i] = hit;
        b.node_source[i] = 0;
    }
    __syncthreads();
    for (int i = 1 + thread; i <= count; i += kThreads) {
        bool all = true;
        for (int n = i; n > 0 && all; n = b.node_parent[n]) all = b.in_row[n];
        if (all) atomicOr(&b.node_source[i], 1);
    }
    for (int q = thread; q < paths; q += kThreads) {
        int node = 0;
        const int length = min(__ldcg(p.path_length + q), kMaxDepth);
        for (int d = 1; d <= length; ++d) {
            const int32_t token = __ldcg(p.path_token + path_at(q, d));
            if (!is_log_probability(__ldcg(p.path_logp + path_at(q, d))) || token < 0) break;
            node = child_with_token(b, count, node, token);
            if (node < 0) break;
            atomicOr(&b.node_source[node], 2);
        }
    }
    __syncthreads();
    for (int i = thread; i <= count; i += kThreads) {
        a.tree.token[i] = b.node_token[i];
        a.tree.parent[i] = b.node_parent[i];
        a.tree.depth[i] = b.node_depth[i];
        a.tree.source[i] = b.node_source[i];
        a.tree.weight[i] = b.node_weight[i];
    }
    if (thread == 0) *a.tree.count = count;
}

__global__ void __launch_bounds__(kThreads) tree_rows(const TreeRowsArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int i = static_cast<int>(threadIdx.x);
    const int rows = min(max(min(__ldcg(a.nodes), __ldcg(a.tree.count)), 0), kMaxNodes) + 1;
    if (i == 0) *a.live = rows;
    if (i >= rows) return;
    int depth = 0;
    for (int n = i; n > 0 && depth < kMaxDepth; ++depth) {
        const int parent = __ldcg(a.tree.parent + n);
        n = parent < n ? max(parent, 0) : 0;
    }
    int32_t* const list = a.batch.ancestors + i * kMaxAncestors;
    for (int n = i, at = depth; at >= 0; --at) {
        list[at] = n;
        const int parent = n > 0 ? __ldcg(a.tree.parent + n) : 0;
        n = parent < n ? max(parent, 0) : 0;
    }
    const int start = __ldcg(a.start);
    a.batch.token[i] = __ldcg(a.tree.token + i);
    a.batch.sequence[i] = __ldcg(a.sequence);
    a.batch.position[i] = start + depth;
    a.batch.prefix[i] = start;
    a.batch.ancestor_count[i] = depth + 1;
}

// One warp: lane l holds nodes l, l + 32, l + 64.
__global__ void __launch_bounds__(32) accept(const AcceptArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    constexpr int kPer = (kMaxTreeRows + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x);
    const int rows = min(max(__ldcg(a.live), 0), kMaxTreeRows);
    const int stops = min(max(__ldcg(a.stop_count), 0), kMaxStops), limit = __ldcg(a.limit);
    int32_t token[kPer], parent[kPer], selected[kPer], stop[2];
    for (int i = 0; i < kPer; ++i) {
        const int n = lane + 32 * i;
        token[i] = n < rows ? __ldcg(a.tree.token + n) : -1;
        parent[i] = n < rows ? __ldcg(a.tree.parent + n) : -2;
        selected[i] = n < rows ? __ldcg(a.selected + n) : -1;
    }
    for (int i = 0; i < 2; ++i) stop[i] = lane + 32 * i < stops ? __ldcg(a.stops + lane + 32 * i) : -1;

    int at = 0, length = 0, failed = 0;
    while (length < limit && rows > 0) {
        int mine = selected[0];
        for (int i = 1; i < kPer; ++i)
            if (at / 32 == i) mine = selected[i];
        const int32_t wanted = __shfl_sync(0xFFFFFFFFu, mine, at % 32);
        if (wanted < 0) {
            failed = 1;
            break;
        }
        if (lane == 0) {
            a.path[length] = at;
            a.emitted[length] = wanted;
        }
        ++length;
        if (__any_sync(0xFFFFFFFFu, stop[0] == wanted || stop[1] == wanted)) break;
        int child = -1;
        for (int i = kPer - 1; i >= 0; --i) {
            const uint32_t hits =
                __ballot_sync(0xFFFFFFFFu, lane + 32 * i > at && parent[i] == at && token[i] == wanted);
            if (hits != 0) child = 32 * i + __ffs(static_cast<int>(hits)) - 1;
        }
        if (child < 0) break;
        at = child;
    }
    if (lane == 0) {
        *a.length = length;
        *a.failed = failed;
    }
}

}  // namespace

void launch_build_tree(const GemmLaunch& l, const BuildTreeArgs& args) {
    launch<build_tree>({l.stream, l.device, l.name, dim3(1), kThreads, static_cast<int>(sizeof(Build))},
                       args);
}

void launch_tree_rows(const GemmLaunch& l, const TreeRowsArgs& args) {
    launch<tree_rows>({l.stream, l.device, l.name, dim3(1), kThreads}, args);
}

void launch_accept(const GemmLaunch& l, const AcceptArgs& args) {
    launch<accept>({l.stream, l.device, l.name, dim3(1), 32}, args);
}

}  // namespace kdt::cuda
