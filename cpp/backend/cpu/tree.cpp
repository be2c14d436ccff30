// Tree ops of the CPU backend: the host algorithms of ddtree/ on the backend's arrays.
#include <algorithm>
#include <cstring>
#include <span>

#include "backend/cpu/cpu_backend.h"
#include "core/error.h"
#include "ddtree/accept.h"
#include "ddtree/build.h"

namespace kdt::cpu {

namespace {

void in_range(const char* what, int value, int low, int high) {
    if (value < low || value > high)
        fail(ErrorCode::invalid_argument, "%s is %d; %d to %d was expected", what, value, low, high);
}

}  // namespace

void CpuBackend::build_tree(const BuildTreeArgs& args) {
    const Op op(*this);
    const ProposalArrays& p = args.proposal;
    in_range("the tree's budget", args.budget, 0, kMaxNodes);
    in_range("the tree's depth limit", args.max_depth, 0, kMaxDepth);
    DraftTable table;
    if (p.table_depth != nullptr && *p.table_depth != 0) {
        in_range("the draft table's depth", *p.table_depth, 0, kMaxTableDepth);
        in_range("the draft table's width", p.table_width, 1, kMaxTableWidth);
        table = {*p.table_depth, p.table_width, p.table_token, p.table_logp};
    }
    DraftPaths paths;
    if (p.path_count != nullptr && *p.path_count != 0) {
        in_range("the number of draft paths", *p.path_count, 0, p.max_paths);
        for (int i = 0; i < *p.path_count; ++i)
            in_range("the length of a draft path", p.path_length[i], 0, kMaxDepth);
        paths = {*p.path_count, kMaxDepth, p.path_length, p.path_token, p.path_logp};
    }
    const Tree tree = kdt::build_tree(*args.root, table, paths, {args.budget, args.max_depth, args.vocab});
    const size_t entries = static_cast<size_t>(tree.count) + 1;
    *args.tree.count = tree.count;
    std::copy_n(tree.token.data(), entries, args.tree.token);
    std::copy_n(tree.parent.data(), entries, args.tree.parent);
    std::copy_n(tree.depth.data(), entries, args.tree.depth);
    std::copy_n(tree.source.data(), entries, args.tree.source);
    std::copy_n(tree.weight.data(), entries, args.tree.weight);
}

void CpuBackend::tree_rows(const TreeRowsArgs& args) {
    const Op op(*this);
    in_range("the tree's node count", *args.tree.count, 0, kMaxNodes);
    in_range("the number of nodes to verify", *args.nodes, 0, kMaxNodes);
    const int rows = std::min(*args.nodes, *args.tree.count) + 1;
    const RowBatch& b = args.batch;
    for (int i = 0; i < rows; ++i) {
        const int parent = args.tree.parent[i];
        if (i == 0 ? parent != -1 : parent < 0 || parent >= i)
            fail(ErrorCode::invalid_argument, "node %d has parent %d; an earlier node was expected", i,
                 parent);
        int32_t* const list = b.ancestors + i * kMaxAncestors;
        const int above = i == 0 ? 0 : b.ancestor_count[parent];
        if (above > 0)
            std::memcpy(list, b.ancestors + parent * kMaxAncestors, static_cast<size_t>(above) * 4);
        list[above] = i;
        b.ancestor_count[i] = above + 1;
        b.token[i] = args.tree.token[i];
        b.sequence[i] = *args.sequence;
        b.position[i] = *args.start + above;
        b.prefix[i] = *args.start;
    }
    *args.live = rows;
}

void CpuBackend::accept(const AcceptArgs& args) {
    const Op op(*this);
    const int rows = *args.live;
    in_range("the number of verified rows", rows, 1, kMaxTreeRows);
    in_range("the number of stop tokens", *args.stop_count, 0, kMaxStops);
    in_range("the number of tokens that may be emitted", *args.limit, 0, INT32_MAX);
    const size_t n = static_cast<size_t>(rows);
    const Accepted accepted = kdt::accept(std::span(args.tree.token, n), std::span(args.tree.parent, n),
                                          std::span(args.selected, n), rows, *args.limit,
                                          std::span(args.stops, static_cast<size_t>(*args.stop_count)));
    *args.length = static_cast<int32_t>(accepted.emitted.size());
    *args.failed = accepted.failed ? 1 : 0;
    std::copy(accepted.path.begin(), accepted.path.end(), args.path);
    std::copy(accepted.emitted.begin(), accepted.emitted.end(), args.emitted);
}

void CpuBackend::commit(const CommitArgs& args) {
    const Op op(*this);
    const int length = *args.length;
    const int start = *args.start;
    in_range("the number of rows to commit", length, 0, kMaxTreeRows);
    in_range("the first position to commit", start, 0, args.cache.pages_per_sequence * kPageSize - length);
    const int32_t* pages =
        args.cache.page_table + static_cast<ptrdiff_t>(*args.sequence) * args.cache.pages_per_sequence;
    for (int j = 0; j < length; ++j) {
        in_range("a scratch row to commit", args.path[j], 0, kMaxTreeRows - 1);
        in_range("a page of the sequence", pages[(start + j) / kPageSize], 0, args.cache.page_count - 1);
    }
    const size_t bytes = static_cast<size_t>(args.width) * sizeof(float);
    for (int layer = 0; layer < args.layers; ++layer) {
        char* const to =
            static_cast<char*>(args.cache.pages) + static_cast<size_t>(layer) * args.page_distance;
        const char* const from =
            static_cast<const char*>(args.cache.scratch) + static_cast<size_t>(layer) * args.scratch_distance;
        for (int j = 0; j < length; ++j) {
            const int position = start + j;
            const size_t slot =
                static_cast<size_t>(pages[position / kPageSize]) * kPageSize + position % kPageSize;
            std::memcpy(to + slot * bytes, from + static_cast<size_t>(args.path[j]) * bytes, bytes);
        }
    }
}

}  // namespace kdt::cpu
