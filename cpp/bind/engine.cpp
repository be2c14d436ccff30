// The engine for Python: builder, engine, executor, session, drafters. Arrays cross without copies or casts
// (noconvert).
#include "engine/engine.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "bind/bind.h"
#include "core/error.h"
#include "draft/ngram.h"
#include "draft/planted.h"
#include "draft/replay.h"
#include "engine/session.h"
#include "model/rope.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace kdt {

namespace {

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

TensorView view(const AnyArray& array, const std::string& name) {
    TensorView v;
    const nb::dlpack::dtype t = array.dtype();
    if (t == nb::dtype<float>())
        v.dtype = DType::f32;
    else if (t == nb::dtype<uint16_t>())
        v.dtype = DType::bf16;
    else if (t == nb::dtype<int32_t>())
        v.dtype = DType::i32;
    else if (t == nb::dtype<uint8_t>())
        v.dtype = DType::u8;
    else
        fail(ErrorCode::bad_model,
             "tensor %s: the array must be float32, uint16 (bf16 bits), int32 or uint8 (fp8)", name.c_str());
    for (size_t i = 0; i < array.ndim(); ++i) v.shape.push_back(static_cast<int64_t>(array.shape(i)));
    v.data = array.data();
    v.bytes = array.nbytes();
    return v;
}

Rounding rounding(bool round_to_bf16) {
    return round_to_bf16 ? Rounding::bf16 : Rounding::exact;
}

// Hands a vector to numpy without a copy.
template <class T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
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
        .def_prop_ro("weight_bytes", [](const Engine& e) { return e.backend().weight_bytes(); })
        .def_prop_ro("rope_inverse_frequencies", [](const Engine& e) {
            std::vector<float> f = rope_inverse_frequencies(e.config());
            const size_t n = f.size();
            return to_numpy(std::move(f), {n});
        });

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

void bind_session(nb::module_& m) {
    nb::class_<Executor>(m, "Executor", "KV pages, scratch and activations for the sessions of one engine.")
        .def(
            "__init__",
            [](Executor* self, std::shared_ptr<Engine> engine, int context, int sessions, int prefill_rows) {
                new (self) Executor(std::move(engine), ExecutorOptions{context, sessions, prefill_rows});
            },
            "engine"_a, "context"_a = 0, "sessions"_a = 1, "prefill_rows"_a = 0)
        .def_prop_ro("context", &Executor::context)
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

    nb::class_<Session>(m, "Session", "One timeline of tokens.")
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
                const size_t vocab = s.executor().engine().config().vocab_size;
                return to_numpy(std::move(logits), {tokens.size(), vocab});
            },
            "tokens"_a, "Appends tokens and returns the float32 logits [n, vocab] after each of them.")
        .def(
            "begin",
            [](Session& s, int max_tokens, float temperature, int top_k, float top_p, float min_p,
               uint64_t seed, uint32_t choice, std::vector<int32_t> stop_tokens,
               std::shared_ptr<Drafter> drafter, int budget, bool keep_logits) {
                GenerateParams p;
                p.max_tokens = max_tokens;
                p.sample = {temperature, top_k, top_p, min_p, seed, choice};
                p.stop_tokens = std::move(stop_tokens);
                p.drafter = std::move(drafter);
                p.budget = budget;
                p.keep_logits = keep_logits;
                s.begin(p);
            },
            "max_tokens"_a, nb::kw_only(), "temperature"_a = 0.0f, "top_k"_a = 0, "top_p"_a = 1.0f,
            "min_p"_a = 0.0f, "seed"_a = 0, "choice"_a = 0, "stop_tokens"_a = std::vector<int32_t>{},
            "drafter"_a.none() = nb::none(), "budget"_a = -1, "keep_logits"_a = false)
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
                const std::vector<float>& all = s.logits();
                const size_t vocab = s.executor().engine().config().vocab_size, n = all.size() / vocab;
                first = std::min(first, n);
                std::vector<float> copy(all.begin() + static_cast<ptrdiff_t>(first * vocab), all.end());
                return to_numpy(std::move(copy), {n - first, vocab});
            },
            "first"_a = 0,
            "float32 [n, vocab]: the logits behind the tokens emitted since begin(keep_logits=True), from "
            "number `first` on.")
        .def(
            "cache",
            [](const Session& s, int layer) {
                const ModelConfig& c = s.executor().engine().config();
                if (layer < 0 || layer >= c.num_hidden_layers)
                    fail(ErrorCode::invalid_argument, "layer %d; the model has layers 0 to %d", layer,
                         c.num_hidden_layers - 1);
                std::vector<float> copy = s.cache(layer);
                const size_t width = c.cache_width(), n = copy.size() / width;
                return to_numpy(std::move(copy), {n, width});
            },
            "layer"_a,
            "float32 [committed, kv_lora_rank + qk_rope_head_dim]: the committed latents of one layer.")
        .def(
            "run_rows",
            [](Session& s, const std::vector<int32_t>& tokens, const std::vector<int32_t>& positions,
               const std::vector<int32_t>& prefixes, const std::vector<std::vector<int32_t>>& ancestors,
               const std::vector<int32_t>& want_logits, const std::vector<int32_t>& want_taps,
               const std::vector<int>& tap_layers) {
                const std::vector<RowSpec> rows = row_specs(tokens, positions, prefixes, ancestors);
                for (const RowSpec& r : rows)
                    if (!r.ancestors.empty() ? r.prefix > s.committed()
                                             : r.position > s.committed() + static_cast<int>(rows.size()))
                        fail(ErrorCode::invalid_argument, "a row sees %d positions and %d are committed",
                             r.prefix, s.committed());
                std::vector<float> logits, taps;
                {
                    nb::gil_scoped_release release;
                    s.executor().run_rows(s.sequence(), rows, want_logits, want_taps, tap_layers, logits,
                                          taps);
                }
                const ModelConfig& c = s.executor().engine().config();
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

void bind_drafters(nb::module_& m) {
    nb::class_<Drafter>(m, "Drafter").def_prop_ro("name", [](const Drafter& d) { return d.name(); });

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
               int width, float break_probability) {
                new (self) PlantedDrafter(std::move(truth), vocab,
                                          PlantedOptions{seed, depth, width, break_probability});
            },
            "truth"_a, "vocab"_a, "seed"_a = 0, "depth"_a = PlantedOptions{}.depth,
            "width"_a = PlantedOptions{}.width, "break_probability"_a = PlantedOptions{}.break_probability)
        .def(
            "propose",
            [](PlantedDrafter& d, const std::vector<int32_t>& tokens) {
                Proposal p;
                d.propose(tokens, kMaxDepth, p);
                const size_t depth = p.depth, width = p.width;
                return nb::make_tuple(to_numpy(std::move(p.table_token), {depth, width}),
                                      to_numpy(std::move(p.table_logp), {depth, width}));
            },
            "tokens"_a, "The draft table (tokens, log-probabilities) for a prefix.");
}

}  // namespace

void bind_engine(nb::module_& m) {
    bind_builder(m);
    bind_drafters(m);
    bind_session(m);
}

}  // namespace kdt
