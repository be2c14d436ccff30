// The engine for Python: builder, engine, executor, session, drafters. Arrays cross without copies or casts
// (noconvert).
#include "engine/engine.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "core/error.h"
#include "engine/footprint.h"
#include "engine/session.h"
#include "model/rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kdt {

using namespace bind_support;

namespace {

Rounding rounding(bool round_to_bf16) {
    return round_to_bf16 ? Rounding::bf16 : Rounding::exact;
}

nb::dict config_dict(const ModelConfig& c) {
    nb::dict d;
    d["vocab_size"] = c.vocab_size;
    d["hidden_size"] = c.hidden_size;
    d["num_hidden_layers"] = c.num_hidden_layers;
    d["num_attention_heads"] = c.num_attention_heads;
    d["q_lora_rank"] = c.q_lora_rank;
    d["kv_lora_rank"] = c.kv_lora_rank;
    d["qk_nope_head_dim"] = c.qk_nope_head_dim;
    d["qk_rope_head_dim"] = c.qk_rope_head_dim;
    d["v_head_dim"] = c.v_head_dim;
    d["n_routed_experts"] = c.n_routed_experts;
    d["num_experts_per_tok"] = c.num_experts_per_tok;
    d["max_position_embeddings"] = c.max_position_embeddings;
    d["softmax_scale"] = c.softmax_scale();
    return d;
}

nb::dict draft_config_dict(const DFlashConfig& c) {
    nb::dict d;
    d["num_hidden_layers"] = c.num_hidden_layers;
    d["num_attention_heads"] = c.num_attention_heads;
    d["num_key_value_heads"] = c.num_key_value_heads;
    d["head_dim"] = c.head_dim;
    d["block_rows"] = c.block_rows;
    d["mask_token_id"] = c.mask_token_id;
    d["target_layers"] = c.target_layers;
    d["window"] = c.window;
    d["causal"] = c.causal;
    d["rope_amplitude"] = c.rotary.amplitude;
    return d;
}

nb::dict trace_dict(const RoundTrace& t) {
    nb::dict seconds;
    seconds["draft_table"] = t.draft_table;
    seconds["draft_paths"] = t.draft_paths;
    seconds["build"] = t.build;
    seconds["verify"] = t.verify;
    seconds["accept"] = t.accept;
    seconds["commit"] = t.commit;
    nb::dict d;
    d["position"] = t.position;
    d["tokens"] = t.tree.token;
    d["parents"] = t.tree.parent;
    d["depths"] = t.tree.depth;
    d["sources"] = t.tree.source;
    d["probabilities"] = t.probability;
    if (t.calibrated.empty())
        d["calibrated"] = nb::none();
    else
        d["calibrated"] = t.calibrated;
    d["nodes"] = t.nodes;
    d["asked"] = t.asked;
    d["path"] = t.path;
    d["emitted"] = t.emitted;
    d["rate"] = t.rate;
    d["seconds"] = seconds;
    return d;
}

nb::dict stats_dict(const SessionStats& s) {
    nb::dict seconds;
    seconds["prefill"] = s.seconds.prefill;
    seconds["draft"] = s.seconds.draft;
    seconds["build"] = s.seconds.build;
    seconds["verify"] = s.seconds.verify;
    seconds["accept"] = s.seconds.accept;
    seconds["commit"] = s.seconds.commit;
    nb::dict d;
    d["target_forwards"] = s.target_forwards;
    d["rounds"] = s.rounds;
    d["drafted"] = s.drafted;
    d["accepted"] = s.accepted;
    d["branching_rounds"] = s.branching_rounds;
    d["accepted_lengths"] = s.accepted_lengths;
    d["seconds"] = seconds;
    return d;
}

void bind_builder(nb::module_& m) {
    nb::class_<Engine>(m, "Engine", "An immutable model on one device. Made by EngineBuilder.finish.")
        .def_prop_ro("config", [](const Engine& e) { return config_dict(e.config()); })
        .def_prop_ro("device", [](const Engine& e) { return e.backend().name(); })
        .def_prop_ro("description", [](const Engine& e) { return e.backend().description(); })
        .def_prop_ro(
            "draft_config",
            [](const Engine& e) -> std::optional<nb::dict> {
                if (e.draft_model() == nullptr) return std::nullopt;
                return draft_config_dict(e.draft_model()->config);
            },
            "Of the draft model that was loaded beside the target; None where there is none.")
        .def_prop_ro("weight_bytes", [](const Engine& e) { return e.backend().weight_bytes(); })
        .def_prop_ro(
            "footprint",
            [](const Engine& e) {
                const Footprint f = footprint(e);
                nb::dict d;
                d["dense"] = f.dense;
                d["head"] = f.head;
                d["embed_row"] = f.embed_row;
                d["expert"] = f.expert;
                d["position"] = f.position;
                d["experts"] = f.experts;
                d["top_k"] = f.top_k;
                d["moe_layers"] = f.moe_layers;
                return d;
            },
            "Bytes that a forward reads: dense (once), head (where logits are wanted), embed_row (each row), "
            "expert (one expert of every MoE layer; top_k of them for one row), position (latents of one "
            "position in all layers).")
        .def_prop_ro(
            "last_level_cache", [](const Engine& e) { return e.backend().last_level_cache(); },
            "Bytes of the last cache in front of the device's memory; 0 where it is not known.")
        .def(
            "read_rate",
            [](const Engine& e, size_t bytes, int passes) {
                nb::gil_scoped_release release;
                const std::lock_guard turn(e.turns());
                return e.backend().read_rate(bytes, passes);
            },
            "bytes"_a, "passes"_a = 5,
            "Bytes per second at which that many bytes of device memory are read, the fastest of some "
            "passes.")
        .def(
            "draft_record",
            [](const Engine& e, const std::string& drafter) {
                DraftRecord record;
                {
                    const std::lock_guard turn(e.turns());
                    record = e.draft_record(drafter);
                }
                nb::list sources;
                for (const DraftRecord::Source& s : record.sources) {
                    nb::dict d;
                    d["purse"] = s.purse;
                    d["earned"] = s.earned;
                    d["value"] = s.value;
                    d["known"] = s.known;
                    d["seconds"] = s.seconds;
                    sources.append(d);
                }
                nb::dict d;
                d["tokens"] = record.tokens;
                d["time"] = record.time;
                d["sources"] = sources;
                return d;
            },
            "drafter"_a,
            "What drafts of the drafter called so have brought, as the last generation that ended left it: "
            "decaying sums of tokens and seconds, and for tables and paths the purse, the credit earned and "
            "the running mean of what a draft promises, in tokens, and the seconds of a draft.")
        .def_prop_ro(
            "rope_inverse_frequencies",
            [](const Engine& e) {
                std::vector<float> f = rope_inverse_frequencies(e.config());
                const size_t n = f.size();
                return to_numpy(std::move(f), {n});
            },
            nb::rv_policy::automatic);

    nb::class_<EngineBuilder>(
        m, "EngineBuilder",
        "Streams a checkpoint into an engine, one tensor at a time; each tensor is copied, so peak memory "
        "is the weights plus one tensor.")
        .def(
            "__init__",
            [](EngineBuilder* self, const std::map<std::string, double>& config, const std::string& device,
               int threads, const std::string& isa, const std::string& precision) {
                new (self) EngineBuilder(config, DeviceOptions{device, threads, isa, precision});
            },
            "config"_a, "device"_a = "cpu", "threads"_a = 0, "isa"_a = "", "precision"_a = "")
        .def(
            "expected",
            [](EngineBuilder& b) {
                std::vector<std::tuple<std::string, std::vector<int64_t>, bool>> list;
                for (ExpectedTensor& t : b.loader().expected())
                    list.emplace_back(std::move(t.name), std::move(t.shape), t.may_be_int4);
                return list;
            },
            "Every tensor that the config implies: (name, shape, whether NAME.qw and NAME.sc may stand for "
            "NAME.weight).")
        .def(
            "add",
            [](EngineBuilder& b, const std::string& name, const AnyArray& array) {
                const TensorView v = view(array, name);
                nb::gil_scoped_release release;
                b.loader().add(name, v);
            },
            "name"_a, "array"_a.noconvert(),
            "A float32 array, or uint16 holding bf16 bits: a matrix [out, in] or a vector [n].")
        .def(
            "add_w4a16",
            [](EngineBuilder& b, const std::string& module, const AnyArray& qw, const AnyArray& sc,
               bool round_to_bf16) {
                const TensorView words = view(qw, module + ".qw"), scales = view(sc, module + ".sc");
                nb::gil_scoped_release release;
                b.loader().add_w4a16(module, words, scales, rounding(round_to_bf16));
            },
            "module"_a, "qw"_a.noconvert(), "sc"_a.noconvert(), "round_to_bf16"_a = false,
            "An INT4 matrix: qw int32 [out, in / 8], sc float32 or uint16 (bf16 bits) [out, in / 32]. With "
            "round_to_bf16 it becomes a bf16 matrix.")
        .def(
            "add_fp8",
            [](EngineBuilder& b, const std::string& name, const AnyArray& codes, const AnyArray& scales,
               bool round_to_bf16) {
                const TensorView c = view(codes, name), s = view(scales, name + "_scale_inv");
                nb::gil_scoped_release release;
                b.loader().add_fp8(name, c, s, rounding(round_to_bf16));
            },
            "name"_a, "codes"_a.noconvert(), "scales"_a.noconvert(), "round_to_bf16"_a = false,
            "An fp8 e4m3 matrix: codes uint8 [out, in], scales float32 [ceil(out / 128), ceil(in / 128)]. It "
            "becomes bf16 where that is exact or asked for, else float32.")
        .def_prop_ro(
            "memory_available", [](EngineBuilder& b) { return b.memory_available(); },
            "Bytes that the device can still hand out.")
        .def(
            "add_draft_model",
            [](EngineBuilder& b, const std::map<std::string, double>& config, std::vector<int> target_layers,
               std::vector<int> window, std::vector<int> causal) {
                return b.add_draft_model(DFlashConfig::from_fields(config, std::move(target_layers),
                                                                   std::move(window), std::move(causal)));
            },
            "config"_a, "target_layers"_a, "window"_a, "causal"_a, nb::keep_alive<0, 1>(),
            "A DFlash draft model beside the target: its loader, to be filled before finish.")
        .def(
            "finish", [](EngineBuilder& b) { return std::const_pointer_cast<Engine>(b.finish()); },
            "The engine; Error when a tensor is missing.");
}

std::vector<RowSpec> row_specs(const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
                               const std::vector<int32_t>& prefixes,
                               const std::vector<std::vector<int32_t>>& ancestors) {
    const size_t n = tokens.size();
    if (positions.size() != n || prefixes.size() != n || ancestors.size() != n)
        fail(
            ErrorCode::invalid_argument,
            "rows: %zu tokens, %zu positions, %zu prefixes, %zu ancestor lists; expected one of each per row",
            n, positions.size(), prefixes.size(), ancestors.size());
    std::vector<RowSpec> rows(n);
    for (size_t i = 0; i < n; ++i) rows[i] = {tokens[i], positions[i], prefixes[i], ancestors[i]};
    return rows;
}

// A thread that waits for a turn lets go of the interpreter's lock, which it need not have: whoever has the
// turn may want it, and a thread that was told to cancel must be able to run.
void* let_go() {
    return PyGILState_Check() ? PyEval_SaveThread() : nullptr;
}

void take_back(void* thread) {
    if (thread != nullptr) PyEval_RestoreThread(static_cast<PyThreadState*>(thread));
}

void bind_session(nb::module_& m) {
    nb::class_<Executor>(m, "Executor", "KV pages, scratch and activations for the sessions of one engine.")
        .def(
            "__init__",
            [](Executor* self, std::shared_ptr<Engine> engine, int context, int sessions, int prefill_rows) {
                new (self) Executor(std::move(engine), ExecutorOptions{context, sessions, prefill_rows});
            },
            "engine"_a, "context"_a = 0, "sessions"_a = 1, "prefill_rows"_a = 0)
        .def_prop_ro("context", &Executor::context)
        .def_prop_ro(
            "vacant",
            [](const Executor& e) {
                const std::lock_guard turn(e.engine().turns());
                return e.vacant();
            },
            "Whether another session can be opened.")
        .def_prop_ro("prefill_rows", &Executor::prefill_rows)
        .def_prop_ro("bytes", &Executor::bytes);

    nb::class_<StepResult>(m, "StepResult", "What one step brought.")
        .def_ro("tokens", &StepResult::tokens)
        .def_prop_ro("finished",
                     [](const StepResult& r) -> std::optional<std::string> {
                         if (r.finish == Finish::none) return std::nullopt;
                         return finish_name(r.finish);
                     })
        .def_ro("prompt_done", &StepResult::prompt_done)
        .def_ro("prompt_total", &StepResult::prompt_total)
        .def_ro("error", &StepResult::error);

    nb::class_<Session>(m, "Session",
                        "One timeline of tokens. Any thread may call it: calls of one session wait for each "
                        "other, computing calls for the engine's turn, in the order in which they came.")
        .def(
            "__init__", [](Session* self, std::shared_ptr<Executor> e) { new (self) Session(std::move(e)); },
            "executor"_a)
        .def(
            "append", [](Session& s, const std::vector<int32_t>& tokens) { s.append(tokens); }, "tokens"_a)
        .def(
            "score",
            [](Session& s, const std::vector<int32_t>& tokens) {
                std::vector<float> logits;
                {
                    nb::gil_scoped_release release;
                    logits = s.score(tokens);
                }
                const size_t vocab = s.engine().config().vocab_size;
                return to_numpy(std::move(logits), {tokens.size(), vocab});
            },
            "tokens"_a, "Appends tokens and returns the float32 logits [n, vocab] after each of them.")
        .def(
            "begin",
            [](Session& s, int max_tokens, float temperature, int top_k, float top_p, float min_p,
               uint64_t seed, uint32_t choice, std::vector<int32_t> stop_tokens,
               std::shared_ptr<Drafter> drafter, int budget, bool keep_logits, bool trace) {
                GenerateParams p;
                p.max_tokens = max_tokens;
                p.sample = {temperature, top_k, top_p, min_p, seed, choice};
                p.stop_tokens = std::move(stop_tokens);
                p.drafter = std::move(drafter);
                p.budget = budget;
                p.keep_logits = keep_logits;
                p.trace = trace;
                s.begin(p);
            },
            "max_tokens"_a, nb::kw_only(), "temperature"_a = 0.0f, "top_k"_a = 0, "top_p"_a = 1.0f,
            "min_p"_a = 0.0f, "seed"_a = 0, "choice"_a = 0, "stop_tokens"_a = std::vector<int32_t>{},
            "drafter"_a.none() = nb::none(), "budget"_a = -1, "keep_logits"_a = false, "trace"_a = false)
        .def("step", &Session::step, nb::call_guard<nb::gil_scoped_release>(),
             "One prompt chunk, or one round.")
        .def("cancel", &Session::cancel)
        .def("rewind", &Session::rewind, "length"_a)
        .def_prop_ro("tokens", [](const Session& s) { return s.tokens(); })
        .def_prop_ro("committed", &Session::committed)
        .def_prop_ro("stats", [](const Session& s) { return stats_dict(s.stats()); })
        .def(
            "logits",
            [](const Session& s, size_t first) {
                std::vector<float> values = s.logits(first);
                const size_t vocab = s.engine().config().vocab_size, n = values.size() / vocab;
                return to_numpy(std::move(values), {n, vocab});
            },
            "first"_a = 0,
            "float32 [n, vocab]: the logits behind the tokens emitted since begin(keep_logits=True), from "
            "number `first` on.")
        .def(
            "cache",
            [](const Session& s, int layer) {
                const ModelConfig& c = s.engine().config();
                if (layer < 0 || layer >= c.num_hidden_layers)
                    fail(ErrorCode::invalid_argument, "layer %d; the model has layers 0 to %d", layer,
                         c.num_hidden_layers - 1);
                std::vector<float> copy = s.cache(layer);
                const size_t width = c.cache_width(), n = copy.size() / width;
                return to_numpy(std::move(copy), {n, width});
            },
            "layer"_a,
            "float32 [committed, kv_lora_rank + qk_rope_head_dim]: the committed latents of one layer.")
        .def_prop_ro(
            "trace",
            [](const Session& s) -> std::optional<nb::dict> {
                const std::optional<RoundTrace> trace = s.trace();
                if (!trace) return std::nullopt;
                return trace_dict(*trace);
            },
            "What the last round did, with begin(trace=True): tree in pop order, choice, path, seconds.")
        .def_prop_ro(
            "draft_positions", [](const Session& s) { return s.draft_positions(); },
            "Positions that the draft model has keys of, and those whose taps it has: the rest wait.")
        .def(
            "draft_features",
            [](const Session& s, int count) {
                std::vector<float> values = s.draft_features(count);
                const size_t n = count, hidden = s.engine().config().hidden_size;
                return to_numpy(std::move(values), {n, hidden});
            },
            "count"_a,
            "float32 [count, hidden]: features of the first positions of the last batch, for tests.")
        .def(
            "draft_logits",
            [](const Session& s) {
                std::vector<float> values = s.draft_logits();
                const size_t vocab = s.engine().config().vocab_size, n = values.size() / vocab;
                return to_numpy(std::move(values), {n, vocab});
            },
            "float32 [drafts, vocab]: what the last draft was taken from, for tests.")
        .def(
            "draft_cache",
            [](const Session& s, int layer) {
                std::vector<float> values = s.draft_cache(layer);
                const DFlashConfig& c = s.engine().draft_model()->config;
                const size_t heads = c.num_key_value_heads, dim = c.head_dim;
                const size_t n = values.size() / (2 * heads * dim);
                return to_numpy(std::move(values), {n, 2, heads, dim});
            },
            "layer"_a, "float32 [positions, 2, kv_heads, head_dim]: keys and values of one draft layer.")
        .def(
            "run_rows",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
               const std::vector<int32_t>& prefixes, const std::vector<std::vector<int32_t>>& ancestors,
               const std::vector<int32_t>& want_logits, const std::vector<int32_t>& want_taps,
               const std::vector<int>& tap_layers) {
                const std::vector<RowSpec> rows = row_specs(tokens, positions, prefixes, ancestors);
                std::vector<float> logits, taps;
                {
                    nb::gil_scoped_release release;
                    s.run_rows(rows, want_logits, want_taps, tap_layers, logits, taps);
                }
                const ModelConfig& c = s.engine().config();
                const size_t vocab = c.vocab_size, width = tap_layers.size() * c.hidden_size;
                return nb::make_tuple(to_numpy(std::move(logits), {want_logits.size(), vocab}),
                                      to_numpy(std::move(taps), {width ? want_taps.size() : 0, width}));
            },
            "tokens"_a, "positions"_a, "prefixes"_a, "ancestors"_a, "want_logits"_a,
            "want_taps"_a = std::vector<int32_t>{}, "tap_layers"_a = std::vector<int>{},
            "One forward over any rows; commits nothing, but prompt rows (empty ancestors) overwrite their "
            "page slots. Returns "
            "(logits [n, vocab], taps [m, layers * hidden]).");
}

}  // namespace

void bind_engine(nb::module_& m) {
    Turns::pause_waits_with({let_go, take_back});
    bind_builder(m);
    bind_session(m);
}

}  // namespace kdt
