// kdtree_engine._native.ops: each op of the CPU backend on numpy arrays, for tests and benchmarks. Arrays are
// used where they lie and must have exactly the stated type, in C order; outputs are new arrays unless `out`
// is given. Rows past `live` keep the 0xFF bytes that new outputs are filled with.
#include "bind/ops_support.h"

namespace kdt {

using namespace ops_support;

static void bind_weights(nb::module_& m) {
    nb::class_<Matrix>(m, "Matrix", "A weight matrix [out, in] in the CPU backend's layout.")
        .def_static(
            "f32",
            [](In<float, 2> w) {
                return std::make_shared<Matrix>(HostMatrix{WeightKind::f32, dim(w, 0), dim(w, 1), w.data()},
                                                "matrix");
            },
            "weights"_a.noconvert(), "From float32 [out, in].")
        .def_static(
            "bf16",
            [](In<uint16_t, 2> w) {
                return std::make_shared<Matrix>(HostMatrix{WeightKind::bf16, dim(w, 0), dim(w, 1), w.data()},
                                                "matrix");
            },
            "bits"_a.noconvert(), "From the bits of bfloat16 values, uint16 [out, in].")
        .def_static(
            "w4a16",
            [](In<int32_t, 2> qw, std::variant<In<float, 2>, In<uint16_t, 2>> scales) {
                HostMatrix h{WeightKind::w4a16, dim(qw, 0), dim(qw, 1) * 8, qw.data()};
                std::visit(
                    [&](const auto& s) {
                        expect("rows of the scales", dim(s, 0), h.out);
                        expect("columns of the scales", dim(s, 1), (h.in + kGroupSize - 1) / kGroupSize);
                        h.scales = s.data();
                    },
                    scales);
                h.scale_dtype = scales.index() == 0 ? DType::f32 : DType::bf16;
                return std::make_shared<Matrix>(h, "matrix");
            },
            "qw"_a.noconvert(), "scales"_a.noconvert(),
            "From packed nibbles, int32 [out, in / 8], and scales [out, in / 32], float32 or the bits of "
            "bfloat16.")
        .def_prop_ro("shape", [](const Matrix& w) { return std::make_pair(w.weight.out, w.weight.in); })
        .def_prop_ro("bytes", [](const Matrix& w) { return w.owner.weight_bytes(); });
    nb::class_<Experts>(m, "Experts", "The routed experts of one layer.")
        .def(
            nb::new_([](std::vector<MatrixPtr> gate, std::vector<MatrixPtr> up, std::vector<MatrixPtr> down) {
                return std::make_shared<Experts>(std::move(gate), std::move(up), std::move(down));
            }),
            "gate"_a, "up"_a, "down"_a);
}

static void bind_linear(nb::module_& m) {
    m.def(
        "embed",
        [](In<int32_t, 1> token, const Matrix& table, KDT_RUN_PARAMS) {
            auto y = make<float>({token.shape(0), static_cast<size_t>(table.weight.in)});
            run(KDT_RUN, dim(token, 0),
                [&](Backend& b, Rows rows) { b.embed({rows, token.data(), table.weight, y.data()}); });
            return y;
        },
        "token"_a.noconvert(), "table"_a, KDT_RUN_ARGS, "Rows of an embedding table: [rows, hidden].");
    m.def(
        "rms_norm",
        [](In<float, 2> x, In<float, 1> weight, float eps, KDT_RUN_PARAMS) {
            const int width = dim(weight, 0);
            if (width > dim(x, 1))
                fail(ErrorCode::invalid_argument, "weights for %d of %d values", width, dim(x, 1));
            auto y = make<float>({x.shape(0), weight.shape(0)});
            run(KDT_RUN, dim(x, 0), [&](Backend& b, Rows rows) {
                b.rms_norm({rows, x.data(), dim(x, 1), weight.data(), eps, width, y.data()});
            });
            return y;
        },
        "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, KDT_RUN_ARGS,
        "x / sqrt(mean(x^2) + eps) * weight over the first len(weight) values of each row.");
    m.def(
        "linear",
        [](In<float, 2> x, const Matrix& w, std::optional<InOut<float, 2>> add_to,
           std::optional<InOut<float, 2>> out, KDT_RUN_PARAMS) {
            expect("columns of x", dim(x, 1), w.weight.in);
            if (add_to && out) fail(ErrorCode::invalid_argument, "add_to and out exclude each other");
            std::optional<Out<float>> fresh;
            float* y;
            if (add_to || out) {
                const InOut<float, 2>& given = add_to ? *add_to : *out;
                expect("rows of the output", dim(given, 0), dim(x, 0));
                expect("columns of the output", dim(given, 1), w.weight.out);
                y = given.data();
            } else {
                fresh = make<float>({x.shape(0), static_cast<size_t>(w.weight.out)});
                y = fresh->data();
            }
            run(KDT_RUN, dim(x, 0),
                [&](Backend& b, Rows rows) { b.linear({rows, x.data(), w.weight, y, add_to.has_value()}); });
            return fresh;
        },
        "x"_a.noconvert(), "w"_a, "add_to"_a.noconvert().none() = nb::none(),
        "out"_a.noconvert().none() = nb::none(), KDT_RUN_ARGS,
        "x . w^T: [rows, out]; written to `out` or added to `add_to` in place where one is given.");
    m.def(
        "gated_linear",
        [](In<float, 2> x, const Matrix& gate, const Matrix& up, KDT_RUN_PARAMS) {
            expect("columns of x", dim(x, 1), gate.weight.in);
            auto y = make<float>({x.shape(0), static_cast<size_t>(gate.weight.out)});
            run(KDT_RUN, dim(x, 0), [&](Backend& b, Rows rows) {
                b.gated_linear({rows, x.data(), gate.weight, up.weight, y.data()});
            });
            return y;
        },
        "x"_a.noconvert(), "gate"_a, "up"_a, KDT_RUN_ARGS, "silu(x . gate^T) * (x . up^T): [rows, out].");
    m.def(
        "gather_rows",
        [](In<float, 2> x, In<int32_t, 1> index, int y_stride, KDT_RUN_PARAMS) {
            for (int j = 0; j < live_of(live, dim(index, 0)); ++j)
                if (index(j) >= dim(x, 0))
                    fail(ErrorCode::invalid_argument, "row %d gathers row %d of %d", j, index(j), dim(x, 0));
            if (y_stride < dim(x, 1))
                fail(ErrorCode::invalid_argument, "a stride of %d for rows of %d", y_stride, dim(x, 1));
            auto y = make<float>({index.shape(0), static_cast<size_t>(y_stride)});
            run(KDT_RUN, dim(index, 0), [&](Backend& b, Rows rows) {
                b.gather_rows({rows, index.data(), x.data(), dim(x, 1), y.data(), y_stride});
            });
            return y;
        },
        "x"_a.noconvert(), "index"_a.noconvert(), "y_stride"_a, KDT_RUN_ARGS,
        "Rows of x: [len(index), y_stride].");
}

static void bind_attention(nb::module_& m) {
    m.def(
        "write_latent",
        [](In<float, 2> ckv, In<float, 1> weight, float eps, In<float, 2> cos, In<float, 2> sin,
           bool interleaved, InOut<float, 3> pages, InOut<float, 2> scratch, In<int32_t, 2> page_table,
           KDT_BATCH_PARAMS, KDT_RUN_PARAMS) {
            const int rows = dim(ckv, 0);
            const RopeTable rope = rope_table(cos, sin, interleaved);
            const Cache cache = cache_of(pages, scratch, page_table);
            expect("columns of ckv", dim(ckv, 1), dim(weight, 0) + rope.rope);
            expect("width of a page", cache.width, dim(ckv, 1));
            if (cache.scratch_rows < rows)
                fail(ErrorCode::invalid_argument, "%d scratch rows for %d rows", cache.scratch_rows, rows);
            const RowBatch batch = KDT_BATCH.view(rows, live, dim(page_table, 0));
            run(KDT_RUN, rows, [&](Backend& b, Rows r) {
                b.write_latent(
                    {r, batch, ckv.data(), weight.data(), eps, dim(weight, 0), rope, cache.view()});
            });
        },
        "ckv"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "cos"_a.noconvert(), "sin"_a.noconvert(),
        "interleaved"_a, "pages"_a.noconvert(), "scratch"_a.noconvert(), "page_table"_a.noconvert(),
        KDT_BATCH_ARGS, KDT_RUN_ARGS,
        "Writes [rms_norm(latent) | rope] of each row to its page slot or scratch row, in place.");
    m.def(
        "absorb_query",
        [](In<float, 3> q, const Matrix& key_up, In<float, 2> cos, In<float, 2> sin, bool interleaved,
           In<int32_t, 1> position, KDT_RUN_PARAMS) {
            const RopeTable rope = rope_table(cos, sin, interleaved);
            const int heads = dim(q, 1), nope = dim(q, 2) - rope.rope;
            expect("columns of key_up", key_up.weight.in, nope);
            expect("rows of position", dim(position, 0), dim(q, 0));
            if (heads < 1 || key_up.weight.out % heads != 0)
                fail(ErrorCode::invalid_argument, "key_up has %d rows for %d heads", key_up.weight.out,
                     heads);
            const int latent = key_up.weight.out / heads;
            auto out = make<float>({q.shape(0), q.shape(1), static_cast<size_t>(latent + rope.rope)});
            RowBatch batch;
            batch.position = const_cast<int32_t*>(position.data());
            run(KDT_RUN, dim(q, 0), [&](Backend& b, Rows rows) {
                b.absorb_query({rows, batch, q.data(), key_up.weight, heads, nope, latent, rope, out.data()});
            });
            return out;
        },
        "q"_a.noconvert(), "key_up"_a, "cos"_a.noconvert(), "sin"_a.noconvert(), "interleaved"_a,
        "position"_a.noconvert(), KDT_RUN_ARGS,
        "[q_nope . key_up[head] | rope(q_rope)] of q [rows, heads, nope + rope]: [rows, heads, latent + "
        "rope].");
    m.def(
        "attend",
        [](In<float, 3> q, In<float, 3> pages, In<float, 2> scratch, In<int32_t, 2> page_table, int rope,
           float scale, KDT_BATCH_PARAMS, KDT_RUN_PARAMS) {
            const int rows = dim(q, 0), heads = dim(q, 1), latent = dim(q, 2) - rope;
            const Cache cache = cache_of(pages, scratch, page_table);
            expect("width of a page", cache.width, dim(q, 2));
            if (rope < 0 || latent < 1)
                fail(ErrorCode::invalid_argument, "%d of %d values are rope", rope, dim(q, 2));
            const RowBatch batch = KDT_BATCH.view(rows, live, dim(page_table, 0));
            if (cache.scratch_rows < kMaxTreeRows)
                fail(ErrorCode::invalid_argument, "%d scratch rows; %d were expected", cache.scratch_rows,
                     kMaxTreeRows);
            auto out = make<float>({q.shape(0), q.shape(1), static_cast<size_t>(latent)});
            run(KDT_RUN, rows, [&](Backend& b, Rows r) {
                b.attend({r, batch, q.data(), cache.view(), heads, latent, rope, scale, out.data()});
            });
            return out;
        },
        "q"_a.noconvert(), "pages"_a.noconvert(), "scratch"_a.noconvert(), "page_table"_a.noconvert(),
        "rope"_a, "scale"_a, KDT_BATCH_ARGS, KDT_RUN_ARGS,
        "Attention of q [rows, heads, latent + rope] over each row's committed prefix and ancestors: "
        "[rows, heads, latent].");
    m.def(
        "project_value",
        [](In<float, 3> o, const Matrix& value_up, KDT_RUN_PARAMS) {
            const int heads = dim(o, 1), latent = dim(o, 2);
            expect("columns of value_up", value_up.weight.in, latent);
            if (heads < 1 || value_up.weight.out % heads != 0)
                fail(ErrorCode::invalid_argument, "value_up has %d rows for %d heads", value_up.weight.out,
                     heads);
            const int v = value_up.weight.out / heads;
            auto out = make<float>({o.shape(0), static_cast<size_t>(value_up.weight.out)});
            run(KDT_RUN, dim(o, 0), [&](Backend& b, Rows rows) {
                b.project_value({rows, o.data(), value_up.weight, heads, latent, v, out.data()});
            });
            return out;
        },
        "o"_a.noconvert(), "value_up"_a, KDT_RUN_ARGS, "o[head] . value_up[head]^T: [rows, heads * v].");
}

static void bind_moe(nb::module_& m) {
    m.def(
        "route",
        [](In<float, 2> x, const Matrix& gate, std::optional<In<float, 1>> bias, const std::string& scoring,
           int top_k, int groups, int top_groups, bool normalize, float scaling, KDT_RUN_PARAMS) {
            expect("columns of x", dim(x, 1), gate.weight.in);
            if (bias) expect("length of bias", dim(*bias, 0), gate.weight.out);
            if (scoring != "sigmoid_noaux_tc" && scoring != "softmax_greedy")
                fail(ErrorCode::invalid_argument,
                     "scoring is '%s'; sigmoid_noaux_tc or softmax_greedy was expected", scoring.c_str());
            if (top_k < 1) fail(ErrorCode::invalid_argument, "top_k is %d", top_k);
            auto expert = make<int32_t>({x.shape(0), static_cast<size_t>(top_k)});
            auto weight = make<float>({x.shape(0), static_cast<size_t>(top_k)});
            run(KDT_RUN, dim(x, 0), [&](Backend& b, Rows rows) {
                Backend::WorkspaceSizes sizes{};
                sizes.rows = rows.capacity;
                sizes.experts = gate.weight.out;
                b.reserve_workspace(sizes);
                b.route({rows, x.data(), gate.weight, bias ? bias->data() : nullptr,
                         scoring == "softmax_greedy" ? Scoring::softmax_greedy : Scoring::sigmoid_noaux_tc,
                         top_k, groups, top_groups, normalize, scaling, expert.data(), weight.data()});
            });
            return std::make_pair(expert, weight);
        },
        "x"_a.noconvert(), "gate"_a, "bias"_a.noconvert().none(), "scoring"_a, "top_k"_a, "groups"_a = 1,
        "top_groups"_a = 1, "normalize"_a = true, "scaling"_a = 1.0f, KDT_RUN_ARGS,
        "Experts of each row, best first, and their weights: int32 and float32 [rows, top_k].");
    m.def(
        "experts",
        [](In<float, 2> x, const Experts& experts, In<int32_t, 2> expert, In<float, 2> weight,
           std::optional<In<float, 2>> shared, InOut<float, 2> y, KDT_RUN_PARAMS) {
            const ExpertSet& set = experts.set;
            expect("columns of x", dim(x, 1), set.hidden);
            expect("columns of y", dim(y, 1), set.hidden);
            expect("rows of y", dim(y, 0), dim(x, 0));
            expect("rows of expert", dim(expert, 0), dim(x, 0));
            expect("rows of weight", dim(weight, 0), dim(x, 0));
            expect("columns of weight", dim(weight, 1), dim(expert, 1));
            if (shared) {
                expect("rows of shared", dim(*shared, 0), dim(x, 0));
                expect("columns of shared", dim(*shared, 1), set.hidden);
            }
            run(KDT_RUN, dim(x, 0), [&](Backend& b, Rows rows) {
                Backend::WorkspaceSizes sizes{};
                sizes.rows = rows.capacity;
                sizes.experts = set.count;
                sizes.top_k = dim(expert, 1);
                sizes.hidden = set.hidden;
                sizes.intermediate = set.intermediate;
                b.reserve_workspace(sizes);
                b.experts({rows, x.data(), set, expert.data(), weight.data(), dim(expert, 1),
                           shared ? shared->data() : nullptr, y.data()});
            });
        },
        "x"_a.noconvert(), "experts"_a, "expert"_a.noconvert(), "weight"_a.noconvert(),
        "shared"_a.noconvert().none(), "y"_a.noconvert(), KDT_RUN_ARGS,
        "Adds the weighted experts' outputs and `shared` to y, in place.");
}

static void bind_primitives(nb::module_& m) {
    m.def(
        "probe_allocation",
        [](size_t bytes) {
            cpu::CpuBackend& b = backend(1, "");
            const Buffer buffer(b, bytes, "a test's buffer");
            const char* data = buffer.as<char>();
            return std::make_pair(reinterpret_cast<uintptr_t>(data) % 64,
                                  nb::bytes(data, std::min<size_t>(bytes, 64)));
        },
        "bytes"_a, "Allocates and frees: the address modulo 64, and the first bytes as they came.");
    m.def(
        "description", [](int threads, std::string isa) { return backend(threads, isa).description(); },
        "threads"_a = 0, "isa"_a = "", "What a backend with these settings runs on.");
    m.def(
        "exp",
        [](In<float, 1> x, std::string isa) {
            auto y = make<float>({x.shape(0)});
            backend(1, isa).kernels().exp_each(x.data(), dim(x, 0), y.data());
            return y;
        },
        "x"_a.noconvert(), "isa"_a = "", "The backend's exp.");
    m.def(
        "log",
        [](In<float, 1> x, std::string isa) {
            auto y = make<float>({x.shape(0)});
            backend(1, isa).kernels().log_each(x.data(), dim(x, 0), y.data());
            return y;
        },
        "x"_a.noconvert(), "isa"_a = "", "The backend's log.");
    m.def(
        "philox",
        [](In<uint32_t, 1> counter, In<uint32_t, 1> key, std::string isa) {
            expect("length of counter", dim(counter, 0), 4);
            expect("length of key", dim(key, 0), 2);
            auto out = make<uint32_t>({size_t{4}});
            backend(1, isa).kernels().philox(counter.data(), key.data(), out.data());
            return out;
        },
        "counter"_a.noconvert(), "key"_a.noconvert(), "isa"_a = "", "Philox4x32-10: four words.");
    m.def(
        "gumbel",
        [](In<int32_t, 1> token, uint32_t position, uint64_t seed, uint32_t choice, std::string isa) {
            auto out = make<float>({token.shape(0)});
            cpu::GumbelJob job{};
            job.id = token.data();
            job.n = dim(token, 0);
            job.key[0] = static_cast<uint32_t>(seed);
            job.key[1] = static_cast<uint32_t>(seed >> 32);
            job.position = position;
            job.choice = choice;
            backend(1, isa).kernels().gumbel_each(job, out.data());
            return out;
        },
        "token"_a.noconvert(), "position"_a, "seed"_a = 0, "choice"_a = 0, "isa"_a = "",
        "Gumbel noise of tokens emitted at a position.");
    m.def(
        "stream_sum",
        [](In<float, 1> x, int threads, std::string isa) {
            cpu::CpuBackend& b = backend(threads, isa);
            nb::gil_scoped_release release;
            return b.stream_sum(x.data(), x.shape(0));
        },
        "x"_a.noconvert(), "threads"_a = 0, "isa"_a = "",
        "Sum of an array, as fast as memory can be read: the yardstick of the benchmarks.");
    m.def(
        "last_level_cache", [] { return backend(1, "").last_level_cache(); },
        "Bytes of the last cache in front of memory; 0 where it is not known.");
}

void bind_ops(nb::module_& parent) {
    nb::module_ m = parent.def_submodule("ops", "Each op of the CPU backend on numpy arrays.");
    bind_weights(m);
    bind_linear(m);
    bind_attention(m);
    bind_moe(m);
    bind_round_ops(m);
    bind_draft_ops(m);
    bind_primitives(m);
}

}  // namespace kdt
