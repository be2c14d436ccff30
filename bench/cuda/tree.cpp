// A round's ops on the draft tree: build, rows, walk, commit.
#include <algorithm>
#include <cmath>

#include "groups.h"

namespace kdt::bench {

namespace {

constexpr int kDepth = 15, kWidth = 16;  // of a drafter's table
constexpr int kLayers = 61, kCacheWidth = 576;
constexpr int kCommitted = 16;

struct Draft {
    std::vector<int32_t> token;
    std::vector<float> logp;
};

// Sums of equal ranks and depth agree in their upper halves: nearly every pop is a close one.
Draft even_table() {
    Draft table;
    for (int d = 0; d < kDepth; ++d)
        for (int r = 0; r < kWidth; ++r) {
            table.token.push_back(100 * d + r);
            table.logp.push_back(-0.3f - 0.4f * static_cast<float>(r) - 0.01f * static_cast<float>(d));
        }
    return table;
}

// The widest table, its rows log-probabilities of random logits, deeper ones flatter as a drafter's are.
Draft random_table() {
    Draft table;
    for (int d = 0; d < kDepth; ++d) {
        std::vector<double> logit(kMaxTableWidth);
        double sum = 0.0;
        for (double& v : logit) v = (7.0 - 0.25 * d) * (static_cast<double>(random_unit()) + 1.0) / 2.0;
        for (const double v : logit) sum += std::exp(v);
        std::sort(logit.rbegin(), logit.rend());
        for (int r = 0; r < kMaxTableWidth; ++r) {
            table.token.push_back(100 * d + r);
            table.logp.push_back(static_cast<float>(logit[static_cast<size_t>(r)] - std::log(sum)));
        }
    }
    return table;
}

Draft crossing_paths(int paths) {
    Draft steps;
    for (int q = 0; q < paths; ++q)
        for (int d = 0; d < kMaxDepth; ++d) {
            steps.token.push_back(100 * d + (q + d) % 5);
            steps.logp.push_back(-0.2f - 0.05f * static_cast<float>((q * d) % 7));
        }
    return steps;
}

BuildTreeArgs build_args(Bench& bench, const Draft& table, int width, const TreeArrays& tree) {
    BuildTreeArgs args{};
    args.proposal.table_depth = bench.scalar(kDepth);
    args.proposal.table_token = bench.array(table.token);
    args.proposal.table_logp = bench.array(table.logp);
    args.proposal.table_width = width;
    args.budget = 64;
    args.max_depth = 64;
    args.vocab = INT32_MAX;
    args.root = bench.scalar(0);
    args.tree = tree;
    return args;
}

void add_paths(Bench& bench, BuildTreeArgs& args, int paths) {
    const Draft steps = crossing_paths(paths);
    args.proposal.path_count = bench.scalar(paths);
    args.proposal.path_length = bench.ints(paths, 20);
    args.proposal.path_token = bench.array(steps.token);
    args.proposal.path_logp = bench.array(steps.logp);
    args.proposal.max_paths = paths;
}

void time_build(Bench& bench, const std::string& what, const BuildTreeArgs& args) {
    bench.report("build_tree, 64 nodes, depth 15" + what, 65,
                 bench.time(50, [&](int) { bench.b.build_tree(args); }), 0);
}

AcceptArgs accept_args(Bench& bench, const TreeArrays& tree, const int32_t* live) {
    std::vector<int32_t> selected(kMaxTreeRows);
    for (int i = 0; i < kMaxTreeRows; ++i) selected[static_cast<size_t>(i)] = 100 * (i % kDepth);
    AcceptArgs args{};
    args.tree = tree;
    args.live = live;
    args.selected = bench.array(selected);
    args.limit = bench.scalar(1000);
    args.stop_count = bench.scalar(0);
    args.stops = bench.ints(kMaxStops);
    args.length = bench.ints(1);
    args.failed = bench.ints(1);
    args.path = bench.ints(kMaxTreeRows);
    args.emitted = bench.ints(kMaxTreeRows);
    return args;
}

// Alone, and behind the walk as in a round.
void time_commit(Bench& bench, AcceptArgs accept) {
    const int pages = 4;
    const size_t layer_bytes = static_cast<size_t>(pages + 2) * 64 * kCacheWidth * 2;
    std::vector<Buffer> caches;  // of all layers, several times
    for (int i = 0; i < 10; ++i) caches.emplace_back(bench.b, kLayers * layer_bytes, "a benchmark");
    int32_t* table = bench.array(std::vector<int32_t>{0, 1, 2, 3});
    std::vector<int32_t> path(kMaxTreeRows);
    for (int i = 0; i < kMaxTreeRows; ++i) path[static_cast<size_t>(i)] = i;
    const int32_t *length = bench.scalar(kCommitted), *rows = bench.array(path), *zero = bench.scalar(0);
    const auto commit = [&](int i) {
        char* data = caches[static_cast<size_t>(i)].as<char>();
        const LatentCache cache{data, data + pages * 64 * kCacheWidth * 2, table, pages, pages};
        bench.b.commit({length, rows, zero, zero, kCacheWidth, cache, kLayers, layer_bytes, layer_bytes});
    };
    const int sets = static_cast<int>(caches.size());
    const double moved = 2.0 * kCommitted * kLayers * kCacheWidth * 2;  // read and written
    bench.report("commit of 16 rows, 61 layers", kCommitted, bench.time(sets, commit), moved);
    accept.length = bench.ints(1, kCommitted);
    bench.report("accept and commit, 61 layers", kCommitted,
                 bench.time(sets,
                            [&](int i) {
                                bench.b.accept(accept);
                                commit(i);
                            }),
                 moved);
}

}  // namespace

void time_tree(Bench& bench) {
    const TreeArrays tree = bench.tree();
    const BuildTreeArgs even = build_args(bench, even_table(), kWidth, tree);
    time_build(bench, "", even);
    time_build(bench, ", K 64", build_args(bench, random_table(), kMaxTableWidth, tree));
    BuildTreeArgs merged = even;
    add_paths(bench, merged, 8);
    time_build(bench, ", 8 paths", merged);

    bench.b.build_tree(even);
    const RowBatch batch = bench.tree_rows();
    int32_t* live = bench.ints(1);
    const int32_t *nodes = bench.scalar(64), *sequence = bench.scalar(0), *start = bench.scalar(0);
    bench.report("tree_rows", 65,
                 bench.time(50, [&](int) { bench.b.tree_rows({tree, nodes, sequence, start, batch, live}); }),
                 0);
    const AcceptArgs accept = accept_args(bench, tree, live);
    bench.report("accept", 65, bench.time(50, [&](int) { bench.b.accept(accept); }), 0);
    time_commit(bench, accept);
    bench.clear();
}

}  // namespace kdt::bench
