// Drafters, the draft model's loader and the budget for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "core/limits.h"
#include "draft/combined.h"
#include "draft/dflash_drafter.h"
#include "draft/dflash_weights.h"
#include "draft/ngram.h"
#include "draft/planted.h"
#include "draft/replay.h"
#include "engine/budget.h"
#include "engine/repetition.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kdt {

using namespace bind_support;

namespace {

void bind_drafters(nb::module_& m) {
    nb::class_<Drafter>(m, "Drafter")
        .def_prop_ro("name", [](const Drafter& d) { return d.name(); })
        .def_prop_ro("sources", &Drafter::sources, "Bit 0: proposes a table; bit 1: paths.")
        .def_prop_ro("uses_draft_model", &Drafter::uses_draft_model);

    nb::class_<DFlashDrafter, Drafter>(m, "DFlashDrafter", "Asks the engine's DFlash draft model: a table.")
        .def(nb::init<int>(), "width"_a = kMaxTableWidth,
             "Keeps the `width` likeliest tokens of each position; 1 drafts a chain.");

    nb::class_<CombinedDrafter, Drafter>(
        m, "CombinedDrafter",
        "Several drafters whose proposals go into one tree; at most one proposes a table.")
        .def(nb::init<std::vector<std::shared_ptr<Drafter>>>(), "drafters"_a);

    nb::class_<NgramDrafter, Drafter>(
        m, "NgramDrafter", "Prompt lookup: continues as the text did after earlier matches of its end.")
        .def(
            "__init__",
            [](NgramDrafter* self, int max_ngram, int min_ngram, int max_paths, int max_length) {
                new (self) NgramDrafter(NgramOptions{max_ngram, min_ngram, max_paths, max_length});
            },
            "max_ngram"_a = NgramOptions{}.max_ngram, "min_ngram"_a = NgramOptions{}.min_ngram,
            "max_paths"_a = NgramOptions{}.max_paths, "max_length"_a = NgramOptions{}.max_length);

    nb::class_<ReplayDrafter, Drafter>(m, "ReplayDrafter",
                                       "Recorded draft tables, keyed by the absolute position of the root.")
        .def(
            "__init__",
            [](ReplayDrafter* self, const Array<int32_t, 1>& position, const Array<int32_t, 3>& tokens,
               const Array<float, 3>& logp) {
                if (tokens.shape(0) != position.shape(0))
                    fail(ErrorCode::invalid_argument, "%zu draft tables for %zu root positions",
                         tokens.shape(0), position.shape(0));
                new (self) ReplayDrafter({position.data(), position.size()}, {tokens.data(), tokens.size()},
                                         {logp.data(), logp.size()}, static_cast<int>(tokens.shape(1)),
                                         static_cast<int>(tokens.shape(2)));
            },
            "position"_a.noconvert(), "tokens"_a.noconvert(), "logp"_a.noconvert());

    nb::class_<PlantedDrafter, Drafter>(
        m, "PlantedDrafter",
        "Drafts planted from a known continuation: the truth at random ranks, broken at random depths.")
        .def(
            "__init__",
            [](PlantedDrafter* self, std::vector<int32_t> truth, int vocab, uint64_t seed, int depth,
               int width, float break_probability, bool as_paths) {
                new (self) PlantedDrafter(std::move(truth), vocab,
                                          PlantedOptions{seed, depth, width, break_probability, as_paths});
            },
            "truth"_a, "vocab"_a, "seed"_a = 0, "depth"_a = PlantedOptions{}.depth,
            "width"_a = PlantedOptions{}.width, "break_probability"_a = PlantedOptions{}.break_probability,
            "as_paths"_a = PlantedOptions{}.as_paths)
        .def(
            "propose",
            [](PlantedDrafter& d, const std::vector<int32_t>& tokens) {
                Proposal p;
                d.propose({tokens, kMaxDepth, nullptr}, p);
                const size_t depth = p.depth, width = p.width;
                return nb::make_tuple(to_numpy(std::move(p.table_token), {depth, width}),
                                      to_numpy(std::move(p.table_logp), {depth, width}));
            },
            "tokens"_a, "The draft table (tokens, log-probabilities) for a prefix.");
}

void bind_draft_model(nb::module_& m) {
    nb::class_<DFlashLoader>(m, "DraftModelLoader",
                             "Streams a DFlash draft model into the engine that is being built.")
        .def("expected", &DFlashLoader::expected,
             "Every tensor that the config implies, without the optional prefix model.: (name, shape).")
        .def(
            "add",
            [](DFlashLoader& loader, const std::string& name, const AnyArray& array) {
                const TensorView v = view(array, name);
                nb::gil_scoped_release release;
                loader.add(name, v);
            },
            "name"_a, "array"_a.noconvert(),
            "A float32 array, or uint16 holding bf16 bits: a matrix [out, in] or a vector [n].");
}

using Ints = std::vector<int32_t>;
using Reals = std::vector<double>;

TreeView checked_tree(const Ints& token, const Ints& parent, const Ints& source, const Reals& weight) {
    const size_t n = weight.size();
    if (n < 1 || n > static_cast<size_t>(kMaxTreeRows) || token.size() != n || parent.size() != n ||
        source.size() != n)
        fail(ErrorCode::invalid_argument,
             "a tree of %zu tokens, %zu parents, %zu sources, %zu weights; 1 to %d of each", token.size(),
             parent.size(), source.size(), n, kMaxTreeRows);
    for (size_t i = 1; i < n; ++i)
        if (parent[i] < 0 || parent[i] >= static_cast<int32_t>(i) || source[i] < 1 || source[i] > 3)
            fail(ErrorCode::invalid_argument, "node %zu has parent %d and source %d", i, parent[i],
                 source[i]);
    return {token, parent, source, weight};
}

// The budget on numbers alone, for tests: rounds are what the caller says, and so is the clock.
void bind_budget(nb::module_& m) {
    nb::class_<CostTable>(m, "CostTable", "Seconds of a verify by number of nodes.")
        .def(nb::init<>())
        .def(
            "measure",
            [](CostTable& t, const std::function<double(int)>& verify, double limit,
               const std::optional<std::function<double(int)>>& prepare) {
                t.measure(verify, limit, prepare.value_or(nullptr));
            },
            "verify"_a, "limit"_a = CostTable::kLimitSeconds, "prepare"_a = nb::none(),
            "Times verify(nodes), which returns seconds, for as many sizes as fit into `limit` of them. "
            "prepare(nodes), before the first of each size, returns seconds that count but are not the "
            "size's.")
        .def("observe", &CostTable::observe, "nodes"_a, "seconds"_a)
        .def("seconds", &CostTable::seconds, "nodes"_a)
        .def_prop_ro("measured", &CostTable::measured)
        .def_prop_ro("plain_known", &CostTable::plain_known)
        .def_prop_ro_static("sizes", [](nb::handle) {
            return std::vector<int>(CostTable::kSizes.begin(), CostTable::kSizes.end());
        });

    nb::class_<Repetition>(m, "Repetition", "How much a text repeats itself.")
        .def(nb::init<>())
        .def(
            "see", [](Repetition& r, const Ints& tokens) { r.see(tokens); }, "tokens"_a,
            "The whole text so far.")
        .def_prop_ro("share", &Repetition::share);

    nb::class_<Budget>(m, "Budget", "Decides who drafts and how many nodes are verified.")
        .def(
            "__init__",
            [](Budget* self, int fixed, const Budget* before, int tokens) {
                new (self) Budget(fixed, before != nullptr ? before->record() : DraftRecord{}, tokens);
            },
            "fixed"_a = -1, "before"_a.none() = nb::none(), "tokens"_a = 0,
            "`before`: a budget of another session of the same engine, whose record this one starts from; "
            "`tokens`: at most so many follow.")
        .def("expect_draft", &Budget::expect_draft, "source"_a, "seconds"_a,
             "What a draft of a source takes, known before the first.")
        .def("sources", &Budget::sources, "available"_a, "costs"_a, "repeats"_a = 0.0,
             "The sources to ask this round, as bits.")
        .def(
            "choose",
            [](Budget& b, const Ints& token, const Ints& parent, const Ints& source, const Reals& weight,
               const CostTable& costs) {
                return b.choose(checked_tree(token, parent, source, weight), costs);
            },
            "token"_a, "parent"_a, "source"_a, "weight"_a, "costs"_a, "Nodes of the tree to verify.")
        .def(
            "observe",
            [](Budget& b, const Ints& token, const Ints& parent, const Ints& source, const Reals& weight,
               int nodes, const Ints& path, const Ints& emitted, int asked, double draft_table,
               double draft_paths, double seconds, const CostTable& costs) {
                RoundOutcome round;
                round.tree = checked_tree(token, parent, source, weight);
                if (nodes < 0 || nodes > round.tree.count() || path.size() != emitted.size())
                    fail(ErrorCode::invalid_argument, "%d of %d nodes, %zu rows on the path, %zu tokens",
                         nodes, round.tree.count(), path.size(), emitted.size());
                for (const int32_t row : path)
                    if (row < 0 || row > nodes)
                        fail(ErrorCode::invalid_argument, "row %d is on the path of %d nodes", row, nodes);
                round.nodes = nodes;
                round.path = path;
                round.emitted = emitted;
                round.asked = asked;
                round.draft = {draft_table, draft_paths};
                round.seconds = seconds;
                b.observe(round, costs);
            },
            "token"_a, "parent"_a, "source"_a, "weight"_a, "nodes"_a, "path"_a, "emitted"_a, "asked"_a,
            "draft_table"_a, "draft_paths"_a, "seconds"_a, "costs"_a,
            "A round ended: what it was and brought.")
        .def("rate", &Budget::rate, "costs"_a, "Running tokens per second.");
}

}  // namespace

void bind_draft(nb::module_& m) {
    bind_drafters(m);
    bind_draft_model(m);
    bind_budget(m);
}

}  // namespace kdt
