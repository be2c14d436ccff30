// Products with weights: dense ones, the absorbed projections of attention, routed experts.
#include <numeric>

#include "core/error.h"
#include "groups.h"
#include "weights.h"

namespace kdt::bench {

namespace {

const char* name_of(WeightKind kind) {
    return kind == WeightKind::w4a16 ? "w4" : "bf16";
}

// Expert ids [rows, top_k], all of a row different. Adds to `distinct` how many are among them.
std::vector<int32_t> random_routing(int rows, int experts, int top_k, int& distinct) {
    std::vector<int32_t> ids;
    std::vector<bool> used(static_cast<size_t>(experts), false);
    for (int i = 0; i < rows; ++i) {
        std::vector<int32_t> order(static_cast<size_t>(experts));
        std::iota(order.begin(), order.end(), 0);
        for (int k = 0; k < top_k; ++k) {
            const size_t at = static_cast<size_t>(k);
            std::swap(order[at], order[at + random_bits() % static_cast<size_t>(experts - k)]);
            ids.push_back(order[at]);
            const size_t expert = static_cast<size_t>(order[at]);
            if (!used[expert]) ++distinct;
            used[expert] = true;
        }
    }
    return ids;
}

}  // namespace

void time_linear(Bench& bench, const std::string& label, WeightKind kind, int out, int in,
                 const std::vector<int>& rows) {
    const std::vector<Weight> w = rotated(bench, kind, out, in);
    for (const int m : rows) {
        float* x = bench.floats(m, in);
        float* y = bench.floats(m, out);
        const int32_t* live = bench.scalar(m);
        const double us = bench.time(static_cast<int>(w.size()), [&](int i) {
            bench.b.linear({{m, live}, x, w[static_cast<size_t>(i)], y, false});
        });
        bench.report(format("linear %s %dx%d %s", name_of(kind), in, out, label.c_str()), m, us,
                     bytes_of(kind, out, in), 2.0 * m * out * in);
        bench.clear();
    }
}

void time_gated(Bench& bench, WeightKind kind, int out, int in, const std::vector<int>& rows) {
    const std::vector<Weight> w = rotated(bench, kind, out, in);
    for (const int m : rows) {
        float* x = bench.floats(m, in);
        float* y = bench.floats(m, out);
        const int32_t* live = bench.scalar(m);
        const int n = static_cast<int>(w.size());
        const double us = bench.time(n, [&](int i) {
            bench.b.gated_linear(
                {{m, live}, x, w[static_cast<size_t>(i)], w[static_cast<size_t>((i + 1) % n)], y});
        });
        bench.report(format("gated %s %dx2x%d", name_of(kind), in, out), m, us, 2 * bytes_of(kind, out, in),
                     4.0 * m * out * in);
        bench.clear();
    }
}

void time_heads(Bench& bench, int heads, const std::vector<int>& rows) {
    const int nope = 128, rope = 64, latent = 512, v = 128;
    const std::vector<Weight> key_up = rotated(bench, WeightKind::bf16, heads * latent, nope);
    const std::vector<Weight> value_up = rotated(bench, WeightKind::bf16, heads * v, latent);
    for (const int m : rows) {
        float* q = bench.floats(m, heads * (nope + rope));
        float* ql = bench.floats(m, heads * (latent + rope));
        float* o = bench.floats(m, heads * v);
        float* table = bench.floats(64, rope / 2);
        const int32_t* live = bench.scalar(m);
        RowBatch batch;
        batch.position = bench.ints(m, 5);
        const RopeTable rt{table, table, rope, 64, true};
        const double us = bench.time(static_cast<int>(key_up.size()), [&](int i) {
            bench.b.absorb_query(
                {{m, live}, batch, q, key_up[static_cast<size_t>(i)], heads, nope, latent, rt, ql});
        });
        bench.report(format("absorb_query %d heads", heads), m, us,
                     bytes_of(WeightKind::bf16, heads * latent, nope), 2.0 * m * heads * latent * nope);
        const double us2 = bench.time(static_cast<int>(value_up.size()), [&](int i) {
            bench.b.project_value({{m, live}, ql, value_up[static_cast<size_t>(i)], heads, latent, v, o});
        });
        bench.report(format("project_value %d heads", heads), m, us2,
                     bytes_of(WeightKind::bf16, heads * v, latent), 2.0 * m * heads * v * latent);
        bench.clear();
    }
}

void time_experts(Bench& bench, const std::string& label, int count, int top_k, int hidden, int inner,
                  const std::vector<int>& rows) {
    const HostWeight in(WeightKind::w4a16, inner, hidden), out(WeightKind::w4a16, hidden, inner);
    std::vector<Weight> gate, up, down;
    for (int e = 0; e < count; ++e) {
        gate.push_back(bench.b.upload_matrix(in.host, "gate"));
        up.push_back(bench.b.upload_matrix(in.host, "up"));
        down.push_back(bench.b.upload_matrix(out.host, "down"));
    }
    const ExpertSet set = bench.b.make_experts(gate, up, down, "experts");
    const double expert_bytes =
        2 * bytes_of(WeightKind::w4a16, inner, hidden) + bytes_of(WeightKind::w4a16, hidden, inner);
    for (const int m : rows) {
        float* x = bench.floats(m, hidden);
        float* y = bench.floats(m, hidden);
        float* weight = bench.floats(m, top_k);
        const int32_t* live = bench.scalar(m);
        const int sets = m <= 4 ? 24 : 6;  // routings: each replay meets other experts
        std::vector<const int32_t*> routed;
        int distinct = 0;  // experts, of all routings together
        for (int s = 0; s < sets; ++s) {
            routed.push_back(bench.array(random_routing(m, count, top_k, distinct)));
        }
        const double us = bench.time(sets, [&](int i) {
            bench.b.experts({{m, live}, x, set, routed[static_cast<size_t>(i)], weight, top_k, nullptr, y});
        });
        const double read = static_cast<double>(distinct) / sets;  // experts of one call
        bench.report("experts " + label, m, us, read * expert_bytes, 6.0 * m * top_k * hidden * inner,
                     format("%.1f experts", read));
        bench.clear();
    }
}

}  // namespace kdt::bench
