// The tree ops against the host's code: integers and float64 bits.
#include <algorithm>
#include <cmath>

#include "ddtree/accept.h"
#include "ddtree/build.h"
#include "testing.h"

namespace kdt::testing {

namespace {

struct Draft {
    int depth, width, paths;
    std::vector<int32_t> token, length, path_token;
    std::vector<float> logp, path_logp;
};

// `flaw`: 0 a proper table; 1 ties; 2 NaN, infinities and disorder; 3 repeated and negative tokens; 4 all of
// them; 5 every weight the same (zero at times), so that rank paths decide everything; 6 weights that agree
// in their upper 32 bits.
Draft random_draft(Random& random, int flaw) {
    Draft d;
    d.depth = random.below(6) == 0 ? 0 : random.between(1, kMaxTableDepth);
    d.width = random.below(4) == 0 ? kMaxTableWidth : random.between(1, 40);
    d.paths = random.below(2) == 0 ? 0 : random.below(8) == 0 ? 128 : random.between(1, 12);
    const int vocab = flaw == 3 || flaw == 4 ? 6 : 200;
    for (int i = 0; i < d.depth; ++i) {
        std::vector<float> row;
        for (int r = 0; r < d.width; ++r) {
            float v = static_cast<float>(std::log(random.unit() + 1e-9));
            if (flaw == 1 || flaw == 4) v = -std::ceil(-v * 2.0f) / 2.0f;
            if (flaw == 5) v = i % 3 == 2 ? -0.0f : -1.0f;
            if (flaw == 6) v = -1.0f - 0x1p-22f * static_cast<float>(random.below(4));
            row.push_back(v);
        }
        std::sort(row.rbegin(), row.rend());
        const std::vector<int> ids = random.permutation(std::max(vocab, d.width));
        for (int r = 0; r < d.width; ++r) {
            float v = row[static_cast<size_t>(r)];
            int32_t token = ids[static_cast<size_t>(r)];
            if ((flaw == 2 || flaw == 4) && random.below(20) == 0)
                v = random.below(3) == 0 ? NAN : random.below(2) ? -INFINITY : 0.5f;
            if (flaw == 3 || flaw == 4) token = random.below(vocab) - (random.below(30) == 0 ? vocab : 0);
            d.token.push_back(token);
            d.logp.push_back(v);
        }
    }
    for (int p = 0; p < d.paths; ++p) {
        const int length = random.below(5) == 0 ? kMaxDepth : random.between(0, 20);
        d.length.push_back(length);
        for (int i = 0; i < kMaxDepth; ++i) {
            float v = -0.25f * static_cast<float>(random.below(8));
            if ((flaw == 2 || flaw == 4) && random.below(15) == 0) v = NAN;
            // often the table's own best token, so that sources meet
            int32_t token = random.below(vocab);
            if (i < d.depth && random.below(2) == 0) token = d.token[static_cast<size_t>(i * d.width)];
            d.path_token.push_back(token);
            d.path_logp.push_back(v);
        }
    }
    return d;
}

struct DeviceTree {
    Device<int32_t> count, token, parent, depth, source;
    Device<double> weight;

    explicit DeviceTree(Backend& b)
        : count(b, size_t{1}),
          token(b, size_t{kMaxTreeRows}),
          parent(b, size_t{kMaxTreeRows}),
          depth(b, size_t{kMaxTreeRows}),
          source(b, size_t{kMaxTreeRows}),
          weight(b, size_t{kMaxTreeRows}) {}
    TreeArrays arrays() const {
        return {count.data(), token.data(), parent.data(), depth.data(), source.data(), weight.data()};
    }
    void set(const Tree& tree) {
        count.set({tree.count});
        token.set(tree.token);
        parent.set(tree.parent);
        depth.set(tree.depth);
        source.set(tree.source);
        weight.set(tree.weight);
    }
};

Tree build_on_device(Backend& b, const Draft& d, int budget, int max_depth, int32_t root, int vocab) {
    const Device<int32_t> depth = scalar(b, static_cast<size_t>(d.depth)),
                          paths = scalar(b, static_cast<size_t>(d.paths));
    const Device<int32_t> droot = scalar(b, static_cast<size_t>(root));
    const Device<int32_t> token(b, d.token), length(b, d.length), path_token(b, d.path_token);
    const Device<float> logp(b, d.logp), path_logp(b, d.path_logp);
    DeviceTree tree(b);
    BuildTreeArgs args{};
    args.proposal.table_depth = depth.data();
    args.proposal.table_token = token.data();
    args.proposal.table_logp = logp.data();
    args.proposal.table_width = d.width;
    args.proposal.path_count = d.paths > 0 ? paths.data() : nullptr;
    args.proposal.path_length = length.data();
    args.proposal.path_token = path_token.data();
    args.proposal.path_logp = path_logp.data();
    args.proposal.max_paths = d.paths;
    args.budget = budget;
    args.max_depth = max_depth;
    args.vocab = vocab;
    args.root = droot.data();
    args.tree = tree.arrays();
    b.build_tree(args);
    Tree t;
    t.count = tree.count.get()[0];
    if (t.count < 0 || t.count > budget) failed("a tree of %d nodes; the budget was %d", t.count, budget);
    const auto cut = [&](auto values) {
        values.resize(static_cast<size_t>(t.count) + 1);
        return values;
    };
    t.token = cut(tree.token.get());
    t.parent = cut(tree.parent.get());
    t.depth = cut(tree.depth.get());
    t.source = cut(tree.source.get());
    t.weight = cut(tree.weight.get());
    return t;
}

Tree build_on_host(const Draft& d, int budget, int max_depth, int32_t root, int vocab = INT32_MAX) {
    const DraftTable table{d.depth, d.width, d.token.data(), d.logp.data()};
    const DraftPaths paths{d.paths, kMaxDepth, d.length.data(), d.path_token.data(), d.path_logp.data()};
    return build_tree(root, table, paths, {budget, max_depth, vocab});
}

void expect_tree(const Tree& got, const Tree& wanted, const std::string& what) {
    expect_same<int32_t>({got.count}, {wanted.count}, what + ", count");
    expect_same(got.token, wanted.token, what + ", token");
    expect_same(got.parent, wanted.parent, what + ", parent");
    expect_same(got.depth, wanted.depth, what + ", depth");
    expect_same(got.source, wanted.source, what + ", source");
    expect_same(got.weight, wanted.weight, what + ", weight");
}

}  // namespace

// Another pop order, ties resolved otherwise, weights summed in another order, sources forgotten, a token
// outside the vocabulary taken.
KDT_CASE(build_tree_equals_the_host) {
    Random random(51);
    Backend& b = backend("bf16");
    int nodes = 0;
    for (int i = 0; i < (options().small ? 280 : 700); ++i) {
        const Draft d = random_draft(random, i % 7);
        const int budget = i % 4 == 0 ? kMaxNodes : random.below(kMaxNodes + 1);
        const int max_depth = i % 3 == 0 ? kMaxDepth : random.below(20);
        const int32_t root = random.below(1000);
        const int vocab = i % 5 == 0 ? random.between(4, 190) : INT32_MAX;
        const Tree wanted = build_on_host(d, budget, max_depth, root, vocab),
                   got = build_on_device(b, d, budget, max_depth, root, vocab);
        const std::string what = format("draft %d, budget %d, depth limit %d", i, budget, max_depth);
        expect_tree(got, wanted, what);
        nodes += got.count;
    }
    if (nodes < 1000) failed("only %d nodes in all", nodes);
}

// A node whose place or source depends on how many come after it: the budget is a truncation.
KDT_CASE(build_tree_budgets_nest) {
    Random random(54);
    Backend& b = backend("bf16");
    for (int i = 0; i < (options().small ? 6 : 40); ++i) {
        const Draft d = random_draft(random, i % 7);
        const Tree whole = build_on_device(b, d, kMaxNodes, kMaxDepth, 3, INT32_MAX);
        for (const int budget : {0, 1, 2, 30, 31, 32, 33, 63}) {
            const Tree part = build_on_device(b, d, budget, kMaxDepth, 3, INT32_MAX);
            const size_t rows = static_cast<size_t>(std::min(budget, whole.count)) + 1;
            if (part.token.size() != rows)
                failed("draft %d: %zu rows of budget %d", i, part.token.size(), budget);
            const std::string what = format("draft %d, budget %d", i, budget);
            expect_same(part.token.data(), whole.token.data(), rows, what + ", token");
            expect_same(part.parent.data(), whole.parent.data(), rows, what + ", parent");
            expect_same(part.source.data(), whole.source.data(), rows, what + ", source");
            expect_same(part.weight.data(), whole.weight.data(), rows, what + ", weight");
        }
    }
}

// A token that stands in a row many times and is taken more than once, a gap that such a row leaves; paths
// that say what the table and other paths say.
KDT_CASE(build_tree_takes_a_token_once) {
    Random random(55);
    Backend& b = backend("bf16");
    for (int i = 0; i < 24; ++i) {
        Draft d;
        d.depth = i % 3 == 0 ? kMaxTableDepth : 5;
        d.width = i % 2 == 0 ? kMaxTableWidth : 33;
        for (int row = 0; row < d.depth; ++row)
            for (int r = 0; r < d.width; ++r) {
                // one token throughout; the last rank alone differs; pairs; the second half repeats the first
                const int half = d.width / 2;
                d.token.push_back(i % 4 == 0   ? 5
                                  : i % 4 == 1 ? (r == d.width - 1 ? 6 : 5)
                                  : i % 4 == 2 ? r / 2
                                               : r % half);
                d.logp.push_back(i % 5 == 0 ? -0.5f : -0.5f - 0.125f * static_cast<float>(r));
            }
        d.paths = i % 8 < 4 ? 0 : i % 8 == 4 ? 128 : 40;
        for (int p = 0; p < d.paths; ++p) {
            d.length.push_back(p % 3 == 0 ? kMaxDepth : 6);
            for (int step = 0; step < kMaxDepth; ++step) {
                d.path_token.push_back(p % 2 == 0 ? 5 : step % 3);
                d.path_logp.push_back(-0.25f * static_cast<float>(p % 3));
            }
        }
        expect_tree(build_on_device(b, d, kMaxNodes, kMaxDepth, 1, INT32_MAX),
                    build_on_host(d, kMaxNodes, kMaxDepth, 1), format("table %d", i));
    }
}

// Weights outside the range in which 32 bits order them (2^-32 .. 2^32), denormal, or so far apart that a sum
// is the larger one: an order by their upper bits alone, a huge weight taken for none.
KDT_CASE(build_tree_orders_weights_of_any_size) {
    Random random(56);
    Backend& b = backend("bf16");
    for (int i = 0; i < (options().small ? 40 : 200); ++i) {
        Draft d = random_draft(random, 0);
        const float sizes[] = {0x1p-149f, 0x1p-130f, 0x1p-40f, 0x1p-32f, 0x1p-20f,
                               1.0f,      0x1p20f,   0x1p33f,  0x1p100f};
        for (int row = 0; row < d.depth; ++row) {
            const float size = i % 3 == 0 ? sizes[i / 3 % 9] : sizes[random.below(9)];
            for (int r = 0; r < d.width; ++r) {
                float& v = d.logp[static_cast<size_t>(row * d.width + r)];
                v = i % 2 == 0 ? -size * (1.0f + 0x1p-20f * static_cast<float>(r)) : v * size;
                if (i % 7 == 0 && r == d.width - 1) v = -3.4e38f;
            }
        }
        for (float& v : d.path_logp) v *= sizes[random.below(9)];
        const int budget = i % 3 == 0 ? kMaxNodes : random.between(1, kMaxNodes);
        expect_tree(build_on_device(b, d, budget, kMaxDepth, 1, INT32_MAX),
                    build_on_host(d, budget, kMaxDepth, 1), format("draft %d", i));
    }
}

// An ancestor list out of order, a position or prefix off by one.
KDT_CASE(tree_rows_name_their_ancestors) {
    Random random(52);
    Backend& b = backend("bf16");
    for (int i = 0; i < 60; ++i) {
        const Tree tree =
            build_on_host(random_draft(random, i % 5), random.below(kMaxNodes + 1), kMaxDepth, 7);
        const int nodes = random.below(kMaxNodes + 1), start = random.below(5000),
                  rows = std::min(nodes, tree.count) + 1;
        DeviceTree device(b);
        device.set(tree);
        const size_t n = kMaxTreeRows;
        Device<int32_t> token(b, n), sequence(b, n), position(b, n), prefix(b, n), count(b, n),
            ancestors(b, n * kMaxAncestors);
        Device<int32_t> live(b, size_t{1});
        const Device<int32_t> dn = scalar(b, static_cast<size_t>(nodes)),
                              ds = scalar(b, static_cast<size_t>(start)), seq = scalar(b, 3);
        b.tree_rows(
            {device.arrays(),
             dn.data(),
             seq.data(),
             ds.data(),
             {token.data(), sequence.data(), position.data(), prefix.data(), count.data(), ancestors.data()},
             live.data()});
        expect_same(live.get(), {rows}, "live rows");
        const auto tokens = token.get(), sequences = sequence.get(), positions = position.get(),
                   prefixes = prefix.get(), counts = count.get(), lists = ancestors.get();
        for (int r = 0; r < rows; ++r) {
            const size_t at = static_cast<size_t>(r);
            std::vector<int32_t> wanted;
            kdt::ancestors(tree.parent.data(), r, wanted);
            expect_same<int32_t>(
                {tokens[at], sequences[at], positions[at], prefixes[at], counts[at]},
                {tree.token[at], 3, start + tree.depth[at], start, static_cast<int32_t>(wanted.size())},
                format("row %d", r));
            expect_same(lists.data() + at * kMaxAncestors, wanted.data(), wanted.size(),
                        format("ancestors of row %d", r));
        }
        for (size_t r = static_cast<size_t>(rows); r < n; ++r)
            if (tokens[r] != -1 || counts[r] != -1)
                failed("row %zu was written; the tree has %d rows", r, rows);
    }
}

// A walk that takes the wrong child, goes on past a stop or the limit, or fails for a node that it never
// reached.
KDT_CASE(accept_equals_the_host) {
    Random random(53);
    Backend& b = backend("bf16");
    size_t long_walks = 0;
    for (int i = 0; i < 300; ++i) {
        Tree tree = build_on_host(random_draft(random, i % 5), kMaxNodes, kMaxDepth, 7);
        if (i % 4 == 0) {  // a chain: the longest walk there is
            tree = Tree{};
            tree.count = kMaxNodes;
            for (int n = 0; n <= kMaxNodes; ++n) {
                tree.token.push_back(random.below(50));
                tree.parent.push_back(n - 1);
                tree.depth.push_back(n);
                tree.source.push_back(1);
                tree.weight.push_back(-n);
            }
        }
        const int rows = random.between(1, tree.count + 1);
        std::vector<int32_t> selected(kMaxTreeRows, -7);
        for (int n = 0; n < rows; ++n) {
            std::vector<int32_t> children;
            for (int c = n + 1; c < rows; ++c)
                if (tree.parent[static_cast<size_t>(c)] == n)
                    children.push_back(tree.token[static_cast<size_t>(c)]);
            int32_t& s = selected[static_cast<size_t>(n)];
            s = random.below(200);
            if (!children.empty() && random.below(8) != 0)
                s = children[static_cast<size_t>(random.below(static_cast<int>(children.size())))];
            if (random.below(25) == 0) s = -1;
        }
        const int limit = random.below(3) == 0 ? random.between(1, 6) : 1000;
        std::vector<int32_t> stops;
        for (int s = random.below(4) == 0 ? random.between(1, kMaxStops) : 0; s > 0; --s)
            stops.push_back(random.below(200));
        const Accepted wanted = accept(tree.token, tree.parent, selected, rows, limit, stops);
        std::vector<int32_t> stop_array(stops);
        stop_array.resize(kMaxStops,
                          wanted.emitted.empty() ? 0 : wanted.emitted[0]);  // past the count: must not stop

        DeviceTree device(b);
        device.set(tree);
        const Device<int32_t> live = scalar(b, static_cast<size_t>(rows)), dsel(b, selected),
                              dlimit = scalar(b, static_cast<size_t>(limit));
        const Device<int32_t> dcount = scalar(b, stops.size()), dstops(b, stop_array);
        Device<int32_t> length(b, size_t{1}), bad(b, size_t{1}), path(b, size_t{kMaxTreeRows}),
            emitted(b, size_t{kMaxTreeRows});
        b.accept({device.arrays(), live.data(), dsel.data(), dlimit.data(), dcount.data(), dstops.data(),
                  length.data(), bad.data(), path.data(), emitted.data()});
        const std::string what = format("walk %d of %d rows", i, rows);
        expect_same(length.get(), {static_cast<int32_t>(wanted.emitted.size())}, what + ", length");
        expect_same(bad.get(), {wanted.failed ? 1 : 0}, what + ", failed");
        expect_same(path.get().data(), wanted.path.data(), wanted.path.size(), what + ", path");
        expect_same(emitted.get().data(), wanted.emitted.data(), wanted.emitted.size(), what + ", emitted");
        long_walks += wanted.path.size() > 4;
    }
    if (long_walks < 20) failed("only %zu walks took more than four steps", long_walks);
}

// The later of two equal children, a child that stands before its parent, a parent that is itself.
KDT_CASE(accept_takes_the_first_of_equal_children) {
    Random random(57);
    Backend& b = backend("bf16");
    size_t steps = 0;
    for (int i = 0; i < 60; ++i) {
        Tree tree;
        tree.count = kMaxNodes;
        for (int n = 0; n <= kMaxNodes; ++n) {
            tree.token.push_back(random.below(3));  // few tokens: many equal children
            tree.parent.push_back(n == 0 ? -1 : random.below(i % 2 == 0 ? n : std::min(n, 6)));
            if (n > 0 && random.below(16) == 0) tree.parent.back() = n;
            if (n > 0 && random.below(16) == 0) tree.parent.back() = random.below(kMaxTreeRows);
            tree.depth.push_back(1);
            tree.source.push_back(1);
            tree.weight.push_back(0.0);
        }
        std::vector<int32_t> selected;
        for (int n = 0; n <= kMaxNodes; ++n) selected.push_back(random.below(3));
        const int rows = random.between(1, kMaxTreeRows);
        const Accepted wanted = accept(tree.token, tree.parent, selected, rows, 1000, {});
        DeviceTree device(b);
        device.set(tree);
        const Device<int32_t> live = scalar(b, static_cast<size_t>(rows)), dsel(b, selected),
                              limit = scalar(b, 1000), count = scalar(b, 0),
                              stops(b, std::vector<int32_t>(kMaxStops, 1));
        Device<int32_t> length(b, size_t{1}), bad(b, size_t{1}), path(b, size_t{kMaxTreeRows}),
            emitted(b, size_t{kMaxTreeRows});
        b.accept({device.arrays(), live.data(), dsel.data(), limit.data(), count.data(), stops.data(),
                  length.data(), bad.data(), path.data(), emitted.data()});
        expect_same(length.get(), {static_cast<int32_t>(wanted.emitted.size())},
                    format("walk %d, length", i));
        expect_same(path.get().data(), wanted.path.data(), wanted.path.size(), format("walk %d, path", i));
        const std::vector<int32_t> all = path.get();
        for (size_t j = wanted.path.size(); j < all.size(); ++j)
            if (all[j] != -1) failed("walk %d: entry %zu behind the path was written", i, j);
        steps += wanted.path.size();
    }
    if (steps < 120) failed("only %zu steps in all", steps);
}

// The longest ancestor list there is, more nodes asked for than the tree has, none, or fewer than none.
KDT_CASE(tree_rows_of_a_chain_and_of_odd_counts) {
    Backend& b = backend("bf16");
    for (const int length : {0, 1, 31, 32, 63, 64})
        for (const int nodes : {-5, 0, 1, 33, 64, 1000}) {
            Tree tree;
            tree.count = length;
            for (int n = 0; n <= length; ++n) {
                tree.token.push_back(100 + n);
                tree.parent.push_back(n - 1);
                tree.depth.push_back(n);
                tree.source.push_back(1);
                tree.weight.push_back(-n);
            }
            DeviceTree device(b);
            for (Device<int32_t>* a : {&device.token, &device.parent, &device.depth, &device.source})
                a->poison();
            const auto padded = [](std::vector<int32_t> v) {
                v.resize(kMaxTreeRows, -1);
                return v;
            };
            device.count.set({length});
            device.token.set(padded(tree.token));
            device.parent.set(padded(tree.parent));
            device.depth.set(padded(tree.depth));
            const size_t n = kMaxTreeRows;
            Device<int32_t> token(b, n), sequence(b, n), position(b, n), prefix(b, n), count(b, n),
                ancestors(b, n * kMaxAncestors), live(b, size_t{1});
            const Device<int32_t> dn(b, std::vector<int32_t>{nodes}), start = scalar(b, 61),
                                                                      seq = scalar(b, 2);
            b.tree_rows({device.arrays(),
                         dn.data(),
                         seq.data(),
                         start.data(),
                         {token.data(), sequence.data(), position.data(), prefix.data(), count.data(),
                          ancestors.data()},
                         live.data()});
            const int rows = std::clamp(nodes, 0, length) + 1;
            const std::string what = format("a chain of %d, %d nodes", length, nodes);
            expect_same(live.get(), {rows}, what);
            const std::vector<int32_t> lists = ancestors.get(), positions = position.get(),
                                       counts = count.get();
            for (int r = 0; r < rows; ++r) {
                std::vector<int32_t> wanted;
                for (int a = 0; a <= r; ++a) wanted.push_back(a);
                expect_same(lists.data() + r * kMaxAncestors, wanted.data(), wanted.size(),
                            what + ", ancestors");
                expect_same<int32_t>({positions[static_cast<size_t>(r)], counts[static_cast<size_t>(r)]},
                                     {61 + r, r + 1}, what);
            }
            for (size_t r = static_cast<size_t>(rows); r < n; ++r)
                if (counts[r] != -1) failed("%s: row %zu was written", what.c_str(), r);
        }
}

}  // namespace kdt::testing
