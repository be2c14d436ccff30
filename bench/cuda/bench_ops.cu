// kdtree-bench-cuda: times the CUDA backend's ops at the shapes of Kimi K2 and Moonlight.
//
// Every figure is the median over replays of a CUDA graph that runs the op once for each of several weight
// (or cache) sets, together far larger than the L2, so that no replay finds its bytes there; microseconds per
// op. `floor` is the op's bytes at 4.3 TB/s, a read rate measured on an H200. Writes one JSON object.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"
#include "backend/staging.h"
#include "core/arguments.h"

namespace {

using namespace kdt;

constexpr double kBytesPerMicrosecond = 4.3e6;
constexpr size_t kRotatedBytes = size_t{400} << 20;  // several times any L2

struct Options {
    std::vector<std::string> only;  // groups; empty: all
    std::string out;
    int replays = 25;
};

uint64_t state = 1;
uint64_t random_bits() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}
float random_unit() {
    return static_cast<float>(random_bits() >> 40) * 0x1p-23f - 1.0f;
}

struct Result {
    std::string name;
    int rows;
    double microseconds, floor, bytes, flops;  // 0: not stated
    std::string note;
};
std::vector<Result> results;

// `bytes`: what must come from memory once, 0 where the L2 may hold it; `flops`: operations of the products.
void report(const std::string& name, int rows, double us, double bytes, double flops = 0.0,
            const std::string& note = "") {
    const double floor = bytes / kBytesPerMicrosecond;
    results.push_back({name, rows, us, floor, bytes, flops, note});
    std::printf("%-44s rows %4d  %9.2f us", name.c_str(), rows, us);
    if (floor > 0.0)
        std::printf("  floor %8.2f us  %4.0f %%  %5.2f TB/s", floor, 100.0 * floor / us, bytes / us / 1e6);
    std::printf("  %s\n", note.c_str());
    std::fflush(stdout);
}

class Bench {
  public:
    Bench(cuda::CudaBackend& backend, const Options& options) : b(backend), options_(options) {
        cudaEventCreate(&begin_);
        cudaEventCreate(&end_);
    }
    bool wants(const std::string& group) const {
        const auto& only = options_.only;
        return only.empty() || std::find(only.begin(), only.end(), group) != only.end();
    }

    // Microseconds of one of the `n` calls of op(0 .. n - 1).
    double time(int n, const std::function<void(int)>& op) {
        const auto graph = b.record([&] {
            for (int i = 0; i < n; ++i) op(i);
        });
        for (int i = 0; i < 3; ++i) graph->launch();
        std::vector<float> times;
        for (int i = 0; i < options_.replays; ++i) {
            cuda::check(cudaEventRecord(begin_, b.stream()), "timing");
            graph->launch();
            cuda::check(cudaEventRecord(end_, b.stream()), "timing");
            cuda::check(cudaEventSynchronize(end_), "timing");
            float ms = 0.0f;
            cuda::check(cudaEventElapsedTime(&ms, begin_, end_), "timing");
            times.push_back(ms);
        }
        std::sort(times.begin(), times.end());
        return static_cast<double>(times[times.size() / 2]) * 1000.0 / n;
    }

    template <class T>
    T* array(const std::vector<T>& values) {
        buffers_.emplace_back(b, values.size() * sizeof(T), "a benchmark");
        T* data = buffers_.back().template as<T>();
        b.upload(data, values.data(), values.size() * sizeof(T));
        b.synchronize();
        return data;
    }
    float* floats(size_t n) {
        std::vector<float> v(n);
        for (float& x : v) x = random_unit();
        return array(v);
    }
    const int32_t* scalar(int value) { return array(std::vector<int32_t>{value}); }
    void clear() { buffers_.clear(); }

    cuda::CudaBackend& b;

  private:
    const Options& options_;
    cudaEvent_t begin_, end_;
    std::vector<Buffer> buffers_;
};

// A matrix of one random row tile over and over: content does not matter to the time, but zeros would.
struct Source {
    std::vector<uint8_t> data, scales;
    HostMatrix host;

    Source(WeightKind kind, int out, int in) {
        const size_t n = static_cast<size_t>(out) * static_cast<size_t>(in);
        const size_t bytes = kind == WeightKind::f32 ? n * 4 : kind == WeightKind::bf16 ? n * 2 : n / 2;
        data.resize(bytes);
        std::vector<uint16_t> pool(1 << 16);
        for (uint16_t& v : pool) {
            const float f = random_unit() * 0.05f;
            uint32_t bits;
            std::memcpy(&bits, &f, 4);
            v = kind == WeightKind::bf16 ? static_cast<uint16_t>(bits >> 16)
                                         : static_cast<uint16_t>(random_bits());
        }
        if (kind == WeightKind::f32)
            for (size_t i = 0; i < n; ++i) {
                const float f = random_unit() * 0.05f;
                std::memcpy(data.data() + 4 * i, &f, 4);
            }
        else
            for (size_t i = 0; i < bytes / 2; ++i)
                std::memcpy(data.data() + 2 * i, &pool[(i * 7919 + i / 65536) % pool.size()], 2);
        host.kind = kind;
        host.out = out;
        host.in = in;
        host.data = data.data();
        if (kind == WeightKind::w4a16) {
            scales.resize(n / 32 * 2);
            for (size_t i = 0; i < n / 32; ++i) {
                const float f = 0.002f + 0.001f * random_unit();
                uint32_t bits;
                std::memcpy(&bits, &f, 4);
                const uint16_t half = static_cast<uint16_t>(bits >> 16);
                std::memcpy(scales.data() + 2 * i, &half, 2);
            }
            host.scales = scales.data();
            host.scale_dtype = DType::bf16;
        }
    }
};

double bytes_of(WeightKind kind, int out, int in) {
    const double n = static_cast<double>(out) * in;
    return kind == WeightKind::w4a16 ? n / 2 + n / 16 : kind == WeightKind::bf16 ? 2 * n : 4 * n;
}

std::vector<Weight> rotated(Bench& bench, WeightKind kind, int out, int in) {
    const Source source(kind, out, in);
    const int sets =
        std::clamp(static_cast<int>(static_cast<double>(kRotatedBytes) / bytes_of(kind, out, in)), 3, 64);
    std::vector<Weight> list;
    for (int i = 0; i < sets; ++i) list.push_back(bench.b.upload_matrix(source.host, "w"));
    return list;
}

void bench_linear(Bench& bench, const std::string& label, WeightKind kind, int out, int in,
                  const std::vector<int>& rows) {
    const std::vector<Weight> w = rotated(bench, kind, out, in);
    for (const int m : rows) {
        float* x = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(in));
        float* y = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(out));
        const int32_t* live = bench.scalar(m);
        const double us = bench.time(static_cast<int>(w.size()), [&](int i) {
            bench.b.linear({{m, live}, x, w[static_cast<size_t>(i)], y, false});
        });
        report(
            format("linear %s %dx%d %s", kind == WeightKind::w4a16 ? "w4" : "bf16", in, out, label.c_str()),
            m, us, bytes_of(kind, out, in), 2.0 * m * out * in);
        bench.clear();
    }
}

void bench_gated(Bench& bench, WeightKind kind, int out, int in, const std::vector<int>& rows) {
    const std::vector<Weight> w = rotated(bench, kind, out, in);
    for (const int m : rows) {
        float* x = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(in));
        float* y = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(out));
        const int32_t* live = bench.scalar(m);
        const int n = static_cast<int>(w.size());
        const double us = bench.time(n, [&](int i) {
            bench.b.gated_linear(
                {{m, live}, x, w[static_cast<size_t>(i)], w[static_cast<size_t>((i + 1) % n)], y});
        });
        report(format("gated %s %dx2x%d", kind == WeightKind::w4a16 ? "w4" : "bf16", in, out), m, us,
               2 * bytes_of(kind, out, in), 4.0 * m * out * in);
        bench.clear();
    }
}

void bench_heads(Bench& bench, int heads, const std::vector<int>& rows) {
    const int nope = 128, rope = 64, latent = 512, v = 128;
    const std::vector<Weight> key_up = rotated(bench, WeightKind::bf16, heads * latent, nope);
    const std::vector<Weight> value_up = rotated(bench, WeightKind::bf16, heads * v, latent);
    for (const int m : rows) {
        const size_t n = static_cast<size_t>(m) * static_cast<size_t>(heads);
        float* q = bench.floats(n * (nope + rope));
        float* ql = bench.floats(n * (latent + rope));
        float* o = bench.floats(n * v);
        float* table = bench.floats(64 * rope / 2);
        const int32_t* live = bench.scalar(m);
        RowBatch batch;
        batch.position = bench.array(std::vector<int32_t>(static_cast<size_t>(m), 5));
        const RopeTable rt{table, table, rope, 64, true};
        const double us = bench.time(static_cast<int>(key_up.size()), [&](int i) {
            bench.b.absorb_query(
                {{m, live}, batch, q, key_up[static_cast<size_t>(i)], heads, nope, latent, rt, ql});
        });
        report(format("absorb_query %d heads", heads), m, us,
               bytes_of(WeightKind::bf16, heads * latent, nope), 2.0 * m * heads * latent * nope);
        const double us2 = bench.time(static_cast<int>(value_up.size()), [&](int i) {
            bench.b.project_value({{m, live}, ql, value_up[static_cast<size_t>(i)], heads, latent, v, o});
        });
        report(format("project_value %d heads", heads), m, us2, bytes_of(WeightKind::bf16, heads * v, latent),
               2.0 * m * heads * v * latent);
        bench.clear();
    }
}

void bench_experts(Bench& bench, const std::string& label, int count, int top_k, int hidden, int inner,
                   const std::vector<int>& rows) {
    const Source in(WeightKind::w4a16, inner, hidden), out(WeightKind::w4a16, hidden, inner);
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
        float* x = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(hidden));
        float* y = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(hidden));
        float* weight = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(top_k));
        const int32_t* live = bench.scalar(m);
        const int sets = m <= 4 ? 24 : 6;  // routings: each replay meets other experts
        std::vector<const int32_t*> routed;
        double distinct = 0.0;
        for (int s = 0; s < sets; ++s) {
            std::vector<int32_t> ids;
            std::vector<bool> used(static_cast<size_t>(count), false);
            for (int i = 0; i < m; ++i) {
                std::vector<int> order(static_cast<size_t>(count));
                for (int e = 0; e < count; ++e) order[static_cast<size_t>(e)] = e;
                for (int k = 0; k < top_k; ++k) {
                    std::swap(order[static_cast<size_t>(k)],
                              order[static_cast<size_t>(k) + random_bits() % static_cast<size_t>(count - k)]);
                    ids.push_back(order[static_cast<size_t>(k)]);
                    if (!used[static_cast<size_t>(ids.back())]) distinct += 1.0 / sets;
                    used[static_cast<size_t>(ids.back())] = true;
                }
            }
            routed.push_back(bench.array(ids));
        }
        const double us = bench.time(sets, [&](int i) {
            bench.b.experts({{m, live}, x, set, routed[static_cast<size_t>(i)], weight, top_k, nullptr, y});
        });
        report("experts " + label, m, us, distinct * expert_bytes, 6.0 * m * top_k * hidden * inner,
               format("%.1f experts", distinct));
        bench.clear();
    }
}

void bench_attention(Bench& bench, int heads, const std::vector<int>& lengths, const std::vector<int>& rows) {
    const int latent = 512, rope = 64, width = latent + rope;
    for (const int kv : lengths) {
        const int pages = (kv + 63) / 64 + 2;
        const size_t cache_bytes = static_cast<size_t>(pages) * 64 * width * 2;
        const int sets = std::clamp(static_cast<int>((size_t{200} << 20) / cache_bytes), 1, 24);
        std::vector<uint16_t> values(static_cast<size_t>(pages) * 64 * width);
        for (uint16_t& v : values) v = static_cast<uint16_t>(0x3C00 + random_bits() % 0x380);
        std::vector<Buffer> caches;
        std::vector<int32_t> table(static_cast<size_t>(pages));
        for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = (i * 7 + 3) % pages;
        if (pages % 7 == 0)
            for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = pages - 1 - i;
        for (int s = 0; s < sets; ++s) {
            caches.emplace_back(bench.b, cache_bytes, "a benchmark");
            bench.b.upload(caches.back().as<void>(), values.data(), cache_bytes);
        }
        bench.b.synchronize();
        for (const int m : rows) {
            const size_t n = static_cast<size_t>(m);
            float* q = bench.floats(n * static_cast<size_t>(heads * width));
            float* out = bench.floats(n * static_cast<size_t>(heads * latent));
            const int32_t* live = bench.scalar(m);
            std::vector<int32_t> ancestors(n * kMaxAncestors, 0), count(n);
            for (size_t i = 0; i < n; ++i) {  // a binary tree's depths
                count[i] = 1;
                for (size_t p = i; p > 0; p = (p - 1) / 2) ++count[i];
                int at = count[i] - 1;
                for (size_t p = i;; p = (p - 1) / 2) {
                    ancestors[i * kMaxAncestors + static_cast<size_t>(at--)] = static_cast<int32_t>(p);
                    if (p == 0) break;
                }
            }
            RowBatch batch;
            batch.sequence = bench.array(std::vector<int32_t>(n, 0));
            batch.prefix = bench.array(std::vector<int32_t>(n, kv));
            batch.ancestor_count = bench.array(count);
            batch.ancestors = bench.array(ancestors);
            std::vector<uint16_t> scratch(static_cast<size_t>(kMaxTreeRows) * width, 0x3C00);
            uint16_t* scratch_kv = bench.array(scratch);
            int32_t* page_table = bench.array(table);
            const double us = bench.time(sets, [&](int i) {
                const LatentCache cache{caches[static_cast<size_t>(i)].as<void>(), scratch_kv, page_table,
                                        pages, pages};
                bench.b.attend({{m, live}, batch, q, cache, heads, latent, rope, 0.1f, out});
            });
            const double flop = 2.0 * m * heads * kv * (width + latent);
            report(format("attend %d heads, kv %d", heads, kv), m, us, static_cast<double>(kv) * width * 2,
                   flop, format("%.0f TFLOP/s", flop / us / 1e6));
            bench.clear();
        }
    }
}

void bench_small(Bench& bench, int hidden, int experts, int top_k, int vocab) {
    const Source router(WeightKind::bf16, experts, hidden);
    std::vector<Weight> gate;
    for (int i = 0; i < 40; ++i) gate.push_back(bench.b.upload_matrix(router.host, "router"));
    const float* bias = bench.b.upload_vector(std::vector<float>(static_cast<size_t>(experts), 0.1f), "bias");
    const float* norm = bench.b.upload_vector(std::vector<float>(static_cast<size_t>(hidden), 1.0f), "norm");
    for (const int m : {1, 8, 16, 64}) {
        float* x = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(hidden));
        float* y = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(hidden));
        float* logits = bench.floats(static_cast<size_t>(m) * static_cast<size_t>(vocab));
        const int32_t* live = bench.scalar(m);
        int32_t* ids = bench.array(std::vector<int32_t>(static_cast<size_t>(m * 64), 0));
        float* weight = bench.floats(static_cast<size_t>(m * 64));
        report(format("rms_norm %d", hidden), m,
               bench.time(40, [&](int) { bench.b.rms_norm({{m, live}, x, hidden, norm, 1e-6f, hidden, y}); }),
               0);
        report(format("route %d experts, hidden %d", experts, hidden), m,
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
        int32_t* position = bench.array(std::vector<int32_t>(static_cast<size_t>(m), 5));
        SampleParams greedy, filtered;
        filtered.temperature = 0.8f;
        filtered.top_p = 0.95f;
        filtered.top_k = 50;
        const SampleParams* g = bench.array(std::vector<SampleParams>{greedy});
        const SampleParams* f = bench.array(std::vector<SampleParams>{filtered});
        report(format("select greedy, vocabulary %d", vocab), m,
               bench.time(10, [&](int) { bench.b.select({{m, live}, logits, vocab, position, g, ids}); }), 0);
        report(format("select top-k 50, top-p, vocabulary %d", vocab), m,
               bench.time(4, [&](int) { bench.b.select({{m, live}, logits, vocab, position, f, ids}); }), 0);
        report(format("top_k 16, vocabulary %d", vocab), m,
               bench.time(4, [&](int) { bench.b.top_k({{m, live}, logits, vocab, 16, ids, weight}); }), 0);
        bench.clear();
    }
}

void bench_tree(Bench& bench) {
    const int depth = 15, width = 16, layers = 61;
    std::vector<int32_t> token;
    std::vector<float> logp;
    for (int d = 0; d < depth; ++d)
        for (int r = 0; r < width; ++r) {
            token.push_back(100 * d + r);
            logp.push_back(-0.3f - 0.4f * static_cast<float>(r) - 0.01f * static_cast<float>(d));
        }
    const auto ints = [&](size_t n) { return bench.array(std::vector<int32_t>(n, 0)); };
    TreeArrays tree{ints(1),
                    ints(kMaxTreeRows),
                    ints(kMaxTreeRows),
                    ints(kMaxTreeRows),
                    ints(kMaxTreeRows),
                    bench.array(std::vector<double>(kMaxTreeRows))};
    BuildTreeArgs build{};
    build.proposal.table_depth = bench.array(std::vector<int32_t>{depth});
    build.proposal.table_token = bench.array(token);
    build.proposal.table_logp = bench.array(logp);
    build.proposal.table_width = width;
    build.budget = 64;
    build.max_depth = 64;
    build.vocab = INT32_MAX;
    build.root = ints(1);
    build.tree = tree;
    report("build_tree, 64 nodes, depth 15", 65, bench.time(50, [&](int) { bench.b.build_tree(build); }), 0);
    // The widest table, its rows log-probabilities of random logits, deeper ones flatter as a drafter's are.
    // (Above, sums of equal ranks and depth agree in their upper halves: nearly every pop is a close one.)
    std::vector<int32_t> wide_token;
    std::vector<float> wide_logp;
    for (int d = 0; d < depth; ++d) {
        std::vector<double> logit(kMaxTableWidth);
        double sum = 0.0;
        for (double& v : logit) v = (7.0 - 0.25 * d) * (static_cast<double>(random_unit()) + 1.0) / 2.0;
        for (const double v : logit) sum += std::exp(v);
        std::sort(logit.rbegin(), logit.rend());
        for (int r = 0; r < kMaxTableWidth; ++r) {
            wide_token.push_back(100 * d + r);
            wide_logp.push_back(static_cast<float>(logit[static_cast<size_t>(r)] - std::log(sum)));
        }
    }
    BuildTreeArgs wide = build;
    wide.proposal.table_token = bench.array(wide_token);
    wide.proposal.table_logp = bench.array(wide_logp);
    wide.proposal.table_width = kMaxTableWidth;
    report("build_tree, 64 nodes, depth 15, K 64", 65, bench.time(50, [&](int) { bench.b.build_tree(wide); }),
           0);
    const int paths = 8;
    std::vector<int32_t> steps;
    std::vector<float> step_logp;
    for (int q = 0; q < paths; ++q)
        for (int d = 0; d < kMaxDepth; ++d) {
            steps.push_back(100 * d + (q + d) % 5);
            step_logp.push_back(-0.2f - 0.05f * static_cast<float>((q * d) % 7));
        }
    BuildTreeArgs merged = build;
    merged.proposal.path_count = bench.array(std::vector<int32_t>{paths});
    merged.proposal.path_length = bench.array(std::vector<int32_t>(paths, 20));
    merged.proposal.path_token = bench.array(steps);
    merged.proposal.path_logp = bench.array(step_logp);
    merged.proposal.max_paths = paths;
    report("build_tree, 64 nodes, depth 15, 8 paths", 65,
           bench.time(50, [&](int) { bench.b.build_tree(merged); }), 0);
    bench.b.build_tree(build);
    RowBatch batch{ints(kMaxTreeRows), ints(kMaxTreeRows), ints(kMaxTreeRows),
                   ints(kMaxTreeRows), ints(kMaxTreeRows), ints(kMaxTreeRows * kMaxAncestors)};
    int32_t* live = ints(1);
    const int32_t* nodes = bench.scalar(64);
    int32_t *sequence = ints(1), *start = ints(1);
    report("tree_rows", 65,
           bench.time(50, [&](int) { bench.b.tree_rows({tree, nodes, sequence, start, batch, live}); }), 0);
    AcceptArgs accept{};
    accept.tree = tree;
    accept.live = live;
    std::vector<int32_t> selected(kMaxTreeRows);
    for (int i = 0; i < kMaxTreeRows; ++i) selected[static_cast<size_t>(i)] = 100 * (i % depth);
    accept.selected = bench.array(selected);
    accept.limit = bench.scalar(1000);
    accept.stop_count = bench.scalar(0);
    accept.stops = ints(kMaxStops);
    accept.length = ints(1);
    accept.failed = ints(1);
    accept.path = ints(kMaxTreeRows);
    accept.emitted = ints(kMaxTreeRows);
    report("accept", 65, bench.time(50, [&](int) { bench.b.accept(accept); }), 0);
    const int width_kv = 576, pages = 4;
    const size_t layer_bytes = static_cast<size_t>(pages + 2) * 64 * width_kv * 2;
    std::vector<Buffer> caches;  // of all layers, several times
    for (int i = 0; i < 10; ++i) caches.emplace_back(bench.b, layers * layer_bytes, "a benchmark");
    int32_t* table = bench.array(std::vector<int32_t>{0, 1, 2, 3});
    std::vector<int32_t> path(kMaxTreeRows);
    for (int i = 0; i < kMaxTreeRows; ++i) path[static_cast<size_t>(i)] = i;
    int32_t *length = bench.array(std::vector<int32_t>{16}), *rows = bench.array(path), *zero = ints(1);
    const auto commit = [&](int i) {
        char* data = caches[static_cast<size_t>(i)].as<char>();
        const LatentCache cache{data, data + pages * 64 * width_kv * 2, table, pages, pages};
        bench.b.commit({length, rows, zero, zero, width_kv, cache, layers, layer_bytes, layer_bytes});
    };
    const int sets = static_cast<int>(caches.size());
    const double moved = 2.0 * 16 * layers * width_kv * 2;  // read and written
    report("commit of 16 rows, 61 layers", 16, bench.time(sets, commit), moved);
    accept.length = bench.array(std::vector<int32_t>{16});
    report("accept and commit, 61 layers", 16,
           bench.time(sets,
                      [&](int i) {
                          bench.b.accept(accept);
                          commit(i);
                      }),
           moved);
    bench.clear();
}

// A round without its forward: what the host and the link take between one round's graph and the next. Wall
// clock of an upload, a graph of the small ops, a read-back and the wait, less the graph's own time on the
// device.
void bench_round(Bench& bench) {
    const size_t in_bytes = 2560, out_bytes = 768;  // of the executor's round, rounded up
    Staging in, out;
    in.add<char>(in_bytes);
    out.add<char>(out_bytes);
    in.allocate(bench.b, "a benchmark", true);
    out.allocate(bench.b, "a benchmark", true);
    const auto ints = [&](size_t n) { return bench.array(std::vector<int32_t>(n, 0)); };
    const TreeArrays tree{ints(1),
                          ints(kMaxTreeRows),
                          ints(kMaxTreeRows),
                          ints(kMaxTreeRows),
                          ints(kMaxTreeRows),
                          bench.array(std::vector<double>(kMaxTreeRows))};
    const RowBatch batch{ints(kMaxTreeRows), ints(kMaxTreeRows), ints(kMaxTreeRows),
                         ints(kMaxTreeRows), ints(kMaxTreeRows), ints(kMaxTreeRows * kMaxAncestors)};
    int32_t *nodes = ints(1), *sequence = ints(1), *start = ints(1), *live = ints(1);
    const auto graph =
        bench.b.record([&] { bench.b.tree_rows({tree, nodes, sequence, start, batch, live}); });
    const double device =
        bench.time(1, [&](int) { bench.b.tree_rows({tree, nodes, sequence, start, batch, live}); });
    std::vector<double> times;
    for (int i = 0; i < 400; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        in.upload();
        graph->launch();
        out.download();
        bench.b.synchronize();
        const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - begin;
        times.push_back(wall.count());
    }
    std::sort(times.begin(), times.end());
    const double wall = times[times.size() / 2];
    report("round without a forward, wall clock", 1, wall, 0);
    report("host turnaround between rounds", 1, wall - device, 0, 0.0,
           format("%.2f us on the device", device));
    bench.clear();
}

constexpr const char* kUsage =
    "usage: kdtree-bench-cuda [--only GROUP,...] [--out FILE] [--replays N]\n"
    "GROUP: linear, dense, gated, heads, experts, moonlight, attend, small, tree, round; all where none is given.\n";

// False where only the usage is asked for.
bool parse(Arguments words, Options& o) {
    while (words.next()) {
        if (words.is("--help") || words.is("-h")) return false;
        if (words.is("--only"))
            o.only = words.choices({"linear", "dense", "gated", "heads", "experts", "moonlight", "attend",
                                    "small", "tree", "round"});
        else if (words.is("--out"))
            o.out = words.text();
        else if (words.is("--replays"))
            o.replays = words.integer(1, 100000);
        else
            words.unknown();
    }
    return true;
}

int run(const Options& o) {
    cuda::CudaBackend backend{CudaOptions{}};
    std::printf("%s\n", backend.description().c_str());
    Bench bench(backend, o);
    const auto w4 = WeightKind::w4a16, bf16 = WeightKind::bf16;
    const std::vector<int> all = {1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256}, few = {1, 8, 16, 64};
    if (bench.wants("linear")) {
        bench_linear(bench, "", w4, 4096, 7168, all);
        bench_linear(bench, "", w4, 7168, 2048, few);
        bench_linear(bench, "", w4, 36864, 7168, all);
        bench_linear(bench, "", w4, 7168, 18432, all);
        bench_linear(bench, "", w4, 2816, 2048, few);
        bench_linear(bench, "", w4, 2048, 1408, few);
    }
    if (bench.wants("dense")) {
        bench_linear(bench, "q_a", bf16, 1536, 7168, few);
        bench_linear(bench, "q_b", bf16, 12288, 1536, few);
        bench_linear(bench, "kv_a", bf16, 576, 7168, few);
        bench_linear(bench, "o", bf16, 7168, 8192, few);
        bench_linear(bench, "head", bf16, 163840, 7168, {1, 16, 64});
        bench_linear(bench, "Moonlight q", bf16, 3072, 2048, few);
        bench_linear(bench, "Moonlight kv_a", bf16, 576, 2048, few);
        bench_linear(bench, "Moonlight o", bf16, 2048, 2048, few);
    }
    if (bench.wants("gated")) {
        bench_gated(bench, bf16, 2048, 7168, few);
        bench_gated(bench, bf16, 2816, 2048, few);
        bench_gated(bench, w4, 2048, 7168, few);
    }
    if (bench.wants("heads")) {
        bench_heads(bench, 64, few);
        bench_heads(bench, 16, {1, 16});
    }
    if (bench.wants("moonlight"))
        bench_experts(bench, "Moonlight, 64 top 6", 64, 6, 2048, 1408, {1, 8, 16, 32, 64, 128});
    if (bench.wants("experts"))
        bench_experts(bench, "K2, 384 top 8", 384, 8, 7168, 2048, {1, 4, 8, 16, 32, 64, 128});
    if (bench.wants("attend")) {
        bench_attention(bench, 64, {1024, 4096, 16384, 65536, 131072}, {1, 8, 16, 32, 64});
        bench_attention(bench, 16, {1024, 4096}, {1, 8, 16, 64});
    }
    if (bench.wants("small")) bench_small(bench, 7168, 384, 8, 163840);
    if (bench.wants("tree")) bench_tree(bench);
    if (bench.wants("round")) bench_round(bench);
    if (!o.out.empty()) {
        std::FILE* f = std::fopen(o.out.c_str(), "w");
        if (f == nullptr) fail(ErrorCode::io, "%s cannot be written", o.out.c_str());
        char date[32];
        const std::time_t now = std::time(nullptr);
        std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
        const double read =
            backend.read_rate(size_t{4} << 30, 5) / 1e9;  // the roof of the record's figures
        std::fprintf(
            f,
            "{\"device\": \"%s\", \"date\": \"%s\", \"replays\": %d, \"read_gb_per_second\": %.1f, "
            "\"results\": [",
            backend.description().c_str(), date, o.replays, read);
        for (size_t i = 0; i < results.size(); ++i)
            std::fprintf(f,
                         "%s\n  {\"name\": \"%s\", \"rows\": %d, \"us\": %.3f, \"floor_us\": %.3f, "
                         "\"bytes\": %.0f, \"flops\": %.0f, \"note\": \"%s\"}",
                         i ? "," : "", results[i].name.c_str(), results[i].rows, results[i].microseconds,
                         results[i].floor, results[i].bytes, results[i].flops, results[i].note.c_str());
        std::fprintf(f, "\n]}\n");
        std::fclose(f);
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    return run_tool(
        "kdtree-bench-cuda", kUsage, [&] { return parse({argc, argv}, options); },
        [&] { return run(options); });
}
