// Rows of a draft tree and the walk through it: the algorithms of cpp/ddtree, in one launch each
// (docs/kernels/tree.md), bit for bit.
#include "backend/cuda/tree.h"

#include "backend/cuda/device.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 128;

// A thread a node. What the arrays hold past the tree is loaded too, in one go with the tree's size, and left
// alone; the walk to the root reads shared memory.
__global__ void __launch_bounds__(kThreads) tree_rows(const TreeRowsArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    static_assert(kMaxTreeRows <= kThreads);
    int32_t* const parents = reinterpret_cast<int32_t*>(ptx::shared_memory());  // [kMaxTreeRows]
    const int i = static_cast<int>(threadIdx.x), node = min(i, kMaxTreeRows - 1);
    const int32_t parent = __ldcg(a.tree.parent + node), token = __ldcg(a.tree.token + node),
                  tree_depth = __ldcg(a.tree.depth + node);
    const int32_t start = __ldcg(a.start), sequence = __ldcg(a.sequence);
    const int rows = min(max(min(__ldcg(a.nodes), __ldcg(a.tree.count)), 0), kMaxNodes) + 1;
    if (i < kMaxTreeRows) parents[i] = parent < i ? max(parent, 0) : 0;
    __syncthreads();
    if (i == 0) *a.live = rows;
    if (i >= rows) return;
    const int depth = min(max(tree_depth, 0), kMaxDepth);
    int32_t* const list = a.batch.ancestors + i * kMaxAncestors;
    for (int n = i, at = depth; at >= 0; --at) {
        list[at] = n;
        n = parents[n];
    }
    a.batch.token[i] = token;
    a.batch.sequence[i] = sequence;
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

void launch_tree_rows(const GemmLaunch& l, const TreeRowsArgs& args) {
    launch<tree_rows>({l.stream, l.device, l.name, dim3(1), kThreads, kMaxTreeRows * 4}, args);
}

void launch_accept(const GemmLaunch& l, const AcceptArgs& args) {
    launch<accept>({l.stream, l.device, l.name, dim3(1), 32}, args);
}

}  // namespace kdt::cuda
