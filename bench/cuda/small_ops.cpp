// What is done to each row by itself: norm, router, the choice of tokens.
#include "core/error.h"
#include "groups.h"
#include "weights.h"

namespace kdt::bench {

constexpr int kMostChosen = 64;  // experts or tokens of a row

void time_small_ops(Bench& bench, int hidden, int experts, int top_k, int vocab,
                    const std::vector<int>& rows) {
    const HostWeight router(WeightKind::bf16, experts, hidden);
    std::vector<Weight> gate;
    for (int i = 0; i < 40; ++i) gate.push_back(bench.b.upload_matrix(router.host, "router"));
    const float* bias = bench.b.upload_vector(std::vector<float>(static_cast<size_t>(experts), 0.1f), "bias");
    const float* norm = bench.b.upload_vector(std::vector<float>(static_cast<size_t>(hidden), 1.0f), "norm");
    for (const int m : rows) {
        float* x = bench.floats(m, hidden);
        float* y = bench.floats(m, hidden);
        float* logits = bench.floats(m, vocab);
        const int32_t* live = bench.scalar(m);
        int32_t* ids = bench.ints(m * kMostChosen);
        float* weight = bench.floats(m, kMostChosen);
        bench.report(
            format("rms_norm %d", hidden), m,
            bench.time(40, [&](int) { bench.b.rms_norm({{m, live}, x, hidden, norm, 1e-6f, hidden, y}); }),
            0);
        bench.report(format("route %d experts, hidden %d", experts, hidden), m,
                     bench.time(40,
                                [&](int i) {
                                    bench.b.route({{m, live},
                                                   x,
                                                   gate[static_cast<size_t>(i)],
                                                   bias,
                                                   Scoring::sigmoid_noaux_tc,
                                                   top_k,
                                                   1,
                                                   1,
                                                   true,
                                                   2.5f,
                                                   ids,
                                                   weight});
                                }),
                     bytes_of(WeightKind::bf16, experts, hidden), 2.0 * m * experts * hidden);
        int32_t* position = bench.ints(m, 5);
        SampleParams greedy, filtered;
        filtered.temperature = 0.8f;
        filtered.top_p = 0.95f;
        filtered.top_k = 50;
        const SampleParams* g = bench.array(std::vector<SampleParams>{greedy});
        const SampleParams* f = bench.array(std::vector<SampleParams>{filtered});
        bench.report(
            format("select greedy, vocabulary %d", vocab), m,
            bench.time(10, [&](int) { bench.b.select({{m, live}, logits, vocab, position, g, ids}); }), 0);
        bench.report(
            format("select top-k 50, top-p, vocabulary %d", vocab), m,
            bench.time(4, [&](int) { bench.b.select({{m, live}, logits, vocab, position, f, ids}); }), 0);
        bench.report(format("top_k 16, vocabulary %d", vocab), m,
                     bench.time(4, [&](int) { bench.b.top_k({{m, live}, logits, vocab, 16, ids, weight}); }),
                     0);
        bench.clear();
    }
}

}  // namespace kdt::bench
