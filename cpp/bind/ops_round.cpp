// A round's ops on numpy arrays: choosing tokens, the draft tree, the walk, the commit.
#include "bind/ops_support.h"

namespace kdt {

using namespace ops_support;

static void bind_sampling(nb::module_& m) {
    m.def(
        "top_k",
        [](In<float, 2> logits, int k, KDT_RUN_PARAMS) {
            if (k < 1) fail(ErrorCode::invalid_argument, "k is %d", k);
            auto token = make<int32_t>({logits.shape(0), static_cast<size_t>(k)});
            auto logp = make<float>({logits.shape(0), static_cast<size_t>(k)});
            run(KDT_RUN, dim(logits, 0), [&](Backend& b, Rows rows) {
                Backend::WorkspaceSizes sizes{};
                sizes.vocab = dim(logits, 1);
                b.reserve_workspace(sizes);
                b.top_k({rows, logits.data(), dim(logits, 1), k, token.data(), logp.data()});
            });
            return std::make_pair(token, logp);
        },
        "logits"_a.noconvert(), "k"_a, KDT_RUN_ARGS,
        "The k most probable tokens of each row and their log-probabilities, descending; ties: lower id.");
    m.def(
        "select",
        [](In<float, 2> logits, In<int32_t, 1> position, float temperature, int top_k, float top_p,
           float min_p, uint64_t seed, uint32_t choice, KDT_RUN_PARAMS) {
            expect("rows of position", dim(position, 0), dim(logits, 0));
            auto token = make<int32_t>({logits.shape(0)});
            const SampleParams sample{temperature, top_k, top_p, min_p, seed, choice};
            run(KDT_RUN, dim(logits, 0), [&](Backend& b, Rows rows) {
                Backend::WorkspaceSizes sizes{};
                sizes.vocab = dim(logits, 1);
                b.reserve_workspace(sizes);
                b.select({rows, logits.data(), dim(logits, 1), position.data(), &sample, token.data()});
            });
            return token;
        },
        "logits"_a.noconvert(), "position"_a.noconvert(), "temperature"_a = 0.0f, "top_k"_a = 0,
        "top_p"_a = 1.0f, "min_p"_a = 0.0f, "seed"_a = 0, "choice"_a = 0, KDT_RUN_ARGS,
        "The token that each row emits: int32 [rows].");
}

static void bind_trees(nb::module_& m) {
    m.def(
        "build_tree",
        [](In<int32_t, 2> table_token, In<float, 2> table_logp, In<int32_t, 1> path_length,
           In<int32_t, 2> path_token, In<float, 2> path_logp, int budget, int max_depth, int root, int vocab,
           int threads, std::string isa) {
            expect("rows of table_logp", dim(table_logp, 0), dim(table_token, 0));
            expect("columns of table_logp", dim(table_logp, 1), dim(table_token, 1));
            expect("rows of path_token", dim(path_token, 0), dim(path_length, 0));
            expect("rows of path_logp", dim(path_logp, 0), dim(path_length, 0));
            expect("columns of path_token", dim(path_token, 1), kMaxDepth);
            expect("columns of path_logp", dim(path_logp, 1), kMaxDepth);
            const auto plain_i = [](const auto& a) { return const_cast<int32_t*>(a.data()); };
            const auto plain_f = [](const auto& a) { return const_cast<float*>(a.data()); };
            int32_t depth = dim(table_token, 0), count = dim(path_length, 0), root_token = root, nodes = 0;
            ProposalArrays p{&depth, plain_i(table_token), plain_f(table_logp), dim(table_token, 1),
                             &count, plain_i(path_length), plain_i(path_token), plain_f(path_logp),
                             count};
            int32_t token[kMaxTreeRows], parent[kMaxTreeRows], depths[kMaxTreeRows], source[kMaxTreeRows];
            double weight[kMaxTreeRows];
            backend(threads, isa)
                .build_tree({p,
                             budget,
                             max_depth,
                             vocab,
                             &root_token,
                             {&nodes, token, parent, depths, source, weight}});
            const size_t n = static_cast<size_t>(nodes) + 1;
            const auto copy = [n]<class T>(const T* from) {
                auto to = make<T>({n});
                std::copy_n(from, n, to.data());
                return to;
            };
            return std::make_tuple(copy(token), copy(parent), copy(depths), copy(source), copy(weight));
        },
        "table_token"_a.noconvert(), "table_logp"_a.noconvert(), "path_length"_a.noconvert(),
        "path_token"_a.noconvert(), "path_logp"_a.noconvert(), "budget"_a, "max_depth"_a, "root"_a,
        "vocab"_a = INT32_MAX, "threads"_a = 1, "isa"_a = "",
        "The draft tree in pop order: token, parent, depth, source, weight, each [nodes + 1].");
    m.def(
        "tree_rows",
        [](In<int32_t, 1> token, In<int32_t, 1> parent, int nodes, int sequence, int start, int threads,
           std::string isa) {
            expect("length of parent", dim(parent, 0), dim(token, 0));
            if (dim(token, 0) < 1 || dim(token, 0) > kMaxTreeRows)
                fail(ErrorCode::invalid_argument, "a tree of %d rows; 1 to %d were expected", dim(token, 0),
                     kMaxTreeRows);
            int32_t count = dim(token, 0) - 1, n = nodes, first = start, row = sequence, live = 0;
            TreeArrays tree;
            tree.count = &count;
            tree.token = const_cast<int32_t*>(token.data());
            tree.parent = const_cast<int32_t*>(parent.data());
            constexpr size_t kRows = kMaxTreeRows;
            auto row_token = make<int32_t>({kRows}), row_sequence = make<int32_t>({kRows});
            auto position = make<int32_t>({kRows}), prefix = make<int32_t>({kRows});
            auto ancestor_count = make<int32_t>({kRows});
            auto ancestors = make<int32_t>({kRows, static_cast<size_t>(kMaxAncestors)});
            backend(threads, isa)
                .tree_rows({tree,
                            &n,
                            &row,
                            &first,
                            {row_token.data(), row_sequence.data(), position.data(), prefix.data(),
                             ancestor_count.data(), ancestors.data()},
                            &live});
            return std::make_tuple(live, row_token, row_sequence, position, prefix, ancestor_count,
                                   ancestors);
        },
        "token"_a.noconvert(), "parent"_a.noconvert(), "nodes"_a, "sequence"_a, "start"_a, "threads"_a = 1,
        "isa"_a = "",
        "Rows of a tree's first nodes: live, then token, sequence, position, prefix, ancestor_count, "
        "ancestors.");
    m.def(
        "accept",
        [](In<int32_t, 1> token, In<int32_t, 1> parent, In<int32_t, 1> selected, int live, int limit,
           In<int32_t, 1> stops, int threads, std::string isa) {
            expect("length of parent", dim(parent, 0), dim(token, 0));
            expect("length of selected", dim(selected, 0), dim(token, 0));
            if (live > dim(token, 0))
                fail(ErrorCode::invalid_argument, "%d live rows of %d", live, dim(token, 0));
            TreeArrays tree;
            tree.token = const_cast<int32_t*>(token.data());
            tree.parent = const_cast<int32_t*>(parent.data());
            int32_t rows = live, most = limit, stop_count = dim(stops, 0);
            int32_t length = 0, failed = 0, path[kMaxTreeRows], emitted[kMaxTreeRows];
            backend(threads, isa)
                .accept({tree, &rows, selected.data(), &most, &stop_count, stops.data(), &length, &failed,
                         path, emitted});
            const size_t n = static_cast<size_t>(length);
            auto path_out = make<int32_t>({n}), emitted_out = make<int32_t>({n});
            std::copy_n(path, n, path_out.data());
            std::copy_n(emitted, n, emitted_out.data());
            return std::make_tuple(path_out, emitted_out, failed != 0);
        },
        "token"_a.noconvert(), "parent"_a.noconvert(), "selected"_a.noconvert(), "live"_a, "limit"_a,
        "stops"_a.noconvert(), "threads"_a = 1, "isa"_a = "",
        "Rows on the accepted path, root first; the tokens emitted; whether the walk met a row without a "
        "token.");
    m.def(
        "commit",
        [](In<int32_t, 1> path, int start, int sequence, InOut<float, 3> pages, In<float, 2> scratch,
           In<int32_t, 2> page_table, int threads, std::string isa) {
            const Cache cache = cache_of(pages, scratch, page_table);
            if (sequence < 0 || sequence >= dim(page_table, 0))
                fail(ErrorCode::invalid_argument, "sequence %d of %d", sequence, dim(page_table, 0));
            for (size_t j = 0; j < path.shape(0); ++j)
                if (path(j) >= cache.scratch_rows)
                    fail(ErrorCode::invalid_argument, "scratch row %d of %d", path(j), cache.scratch_rows);
            const int32_t length = dim(path, 0), first = start, row = sequence;
            backend(threads, isa)
                .commit({&length, path.data(), &first, &row, cache.width, cache.view(), 1, 0, 0});
        },
        "path"_a.noconvert(), "start"_a, "sequence"_a, "pages"_a.noconvert(), "scratch"_a.noconvert(),
        "page_table"_a.noconvert(), "threads"_a = 1, "isa"_a = "",
        "Copies scratch rows to positions start, start + 1, ... of a sequence's pages, in place.");
}

void bind_round_ops(nb::module_& m) {
    bind_sampling(m);
    bind_trees(m);
}

}  // namespace kdt
