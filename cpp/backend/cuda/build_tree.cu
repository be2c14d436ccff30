// Best-first build of the draft tree: the algorithm of cpp/ddtree/build.cpp in one launch, bit for bit
// (docs/kernels/tree.md), by one block.
//
//   16 warps   the proposal to shared memory, a row or a path each      build_tree_proposal.cuh
//    1 warp    pops, its frontier in registers                          build_tree_frontier.cuh and
//                                                                       ..._table.cuh (without paths)
//                                                                       ..._merged.cuh (with paths)
//   12 warps   meanwhile: does a row hold a token twice? Then all warps close the gaps, and it pops once
//              more                                                     build_tree_proposal.cuh
//   16 warps   who proposed each node (with paths); the nodes to global memory
#include "backend/cuda/build_tree_merged.cuh"
#include "backend/cuda/build_tree_proposal.cuh"
#include "backend/cuda/build_tree_table.cuh"
#include "backend/cuda/launch.h"
#include "ddtree/tree.h"

namespace kdt::cuda {

namespace {

using namespace tree_build;

// Everyone who proposes a node, whether or not their candidate came up: the table where every token down to
// the node stands in its depth's row, a path where its steps lead there.
__device__ __forceinline__ void mark_sources(Shared& sm, int count, int paths, const int32_t* step_token,
                                             int table_rows, int thread) {
    const int warp = thread / 32, lane = thread % 32;
    for (int i = thread; i <= count; i += kThreads) {
        const int d = sm.node_depth[i] - 1;
        bool hit = i == 0;
        if (i > 0 && d < table_rows)
            for (int j = 0; j < sm.width[d] && !hit; ++j)
                hit = sm.cell_token[d * kRow + j] == sm.node_token[i];
        sm.in_row[i] = hit;
        sm.node_source[i] = 0;
    }
    __syncthreads();
    for (int i = 1 + thread; i <= count; i += kThreads) {
        bool all = true;
        for (int n = i; n > 0 && all; n = sm.node_parent[n]) all = sm.in_row[n] != 0;
        if (all) atomicOr(&sm.node_source[i], kFromTable);
    }
    int parent[3], token[3];
    for (int s = 0; s < 3; ++s) {
        const int n = lane + 32 * s;
        parent[s] = n > 0 && n <= count ? sm.node_parent[n] : -2;
        token[s] = n > 0 && n <= count ? sm.node_token[n] : -1;
    }
    for (int q = warp; q < paths; q += kWarps) {
        int node = 0;
        for (int d = 0; d < sm.path_length[q]; ++d) {
            const int32_t wanted = step_token[q * kMaxDepth + d];
            int next = -1;
            for (int s = 2; s >= 0; --s) {
                const uint32_t hit = __ballot_sync(kAll, parent[s] == node && token[s] == wanted);
                if (hit != 0) next = 32 * s + __ffs(static_cast<int>(hit)) - 1;
            }
            if (next < 0) break;
            node = next;
            if (lane == 0) atomicOr(&sm.node_source[node], kFromPath);
        }
    }
}

// The nodes in shared memory to the tree's arrays; without paths from their records.
template <bool Paths>
__device__ __forceinline__ void write_tree(const Shared& sm, const TreeArrays& tree, int count, int thread) {
    for (int i = thread; i <= count; i += kThreads) {
        int32_t node_token = sm.node_token[i], parent = sm.node_parent[i], depth = sm.node_depth[i],
                source = 0;
        if (Paths) {
            source = sm.node_source[i];
        } else if (i > 0) {
            const int cell = static_cast<int>(sm.record[i] & 0xFFFF);
            node_token = sm.cell_token[cell];
            parent = static_cast<int32_t>(sm.record[i] >> 16);
            depth = cell / kRow + 1;
            source = kFromTable;
        }
        tree.token[i] = node_token;
        tree.parent[i] = parent;
        tree.depth[i] = depth;
        tree.source[i] = source;
        tree.weight[i] = 0.0 - sm.node_weight[i];
    }
    if (thread == 0) *tree.count = count;
}

// `PathSets`: of 32 draft paths each; 0: none.
template <int PathSets>
__global__ void __launch_bounds__(kThreads, 1) build_tree(const BuildTreeArgs a) {
    constexpr bool Paths = PathSets > 0;
    ptx::grid_launch_next();
    ptx::grid_wait();
    Shared& sm = *reinterpret_cast<Shared*>(ptx::shared_memory());
    float* const step_weight = reinterpret_cast<float*>(&sm + 1);
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

    // The proposal, a warp a row: of the table everything is asked for before anything is awaited.
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
        if (d < table_rows) prepare_row(sm, d, width, a.vocab, token[turn], logp[turn], lane);
    }
    for (int i = thread; i < (kRows - table_rows) * 4; i += kThreads)
        sm.cell[(table_rows + i / 4) * kRow + i % 4] = infinity();
    if (Paths)
        for (int q = warp; q < paths; q += kWarps) prepare_path(sm, a, q, step_weight, step_token, lane);
    if (thread == 0) {
        sm.node_token[0] = root;
        sm.node_parent[0] = -1;
        sm.node_depth[0] = 0;
        sm.node_weight[0] = 0.0;
        sm.repeated = 0;
    }
    __syncthreads();

    // Rows that hold a token twice are rare: while the first warp pops as if there were none, the others
    // look.
#pragma unroll 1
    for (bool packed = false;; packed = true) {
        if (warp == 0) {
            int count = 0;
            if constexpr (Paths) {
                MergedFrontier<PathSets> frontier(sm, lane, step_weight, step_token);
                frontier.begin();
                frontier.begin_paths(paths, a.max_depth);
                count = frontier.pop(a.budget);
            } else {
                TableFrontier frontier(sm, lane);
                frontier.begin();
                // prefix n has slot n; what node 64 leads to is not asked for
                if (frontier.pop<1>(count, min(a.budget, 31))) frontier.pop<2>(count, a.budget);
            }
            if (lane == 0) sm.count = count;
        } else if (!packed && warp % 4 != 0) {  // not those that share the first warp's scheduler
            for (int d = warp - 1 - warp / 4; d < table_rows; d += kWarps / 4 * 3)
                if (row_repeats(sm, d, lane) && lane == 0) sm.repeated = 1;
        }
        __syncthreads();
        if (packed || sm.repeated == 0) break;
        for (int d = warp; d < table_rows; d += kWarps) pack_row(sm, d, lane);
        __syncthreads();
    }

    const int count = sm.count;
    if (Paths) {
        mark_sources(sm, count, paths, step_token, table_rows, thread);
        __syncthreads();
    }
    write_tree<Paths>(sm, a.tree, count, thread);
}

}  // namespace

void launch_build_tree(const GemmLaunch& l, const BuildTreeArgs& args) {
    const bool paths = args.proposal.path_count != nullptr && args.proposal.max_paths > 0;
    const int steps = paths ? args.proposal.max_paths * kMaxDepth : 0;
    const Launch as{l.stream, l.device, l.name,
                    dim3(1),  kThreads, static_cast<int>(sizeof(Shared)) + steps * 8};
    if (!paths)
        launch<build_tree<0>>(as, args);
    else if (args.proposal.max_paths <= 32)
        launch<build_tree<1>>(as, args);
    else
        launch<build_tree<4>>(as, args);
}

}  // namespace kdt::cuda
