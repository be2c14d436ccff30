// Router and experts.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing.h"

namespace kdt::testing {

namespace {

std::vector<float> random_rows(Random& random, int rows, int width) {
    std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(width));
    for (float& v : x) v = random.symmetric();
    return x;
}

struct RouteShape {
    Scoring scoring;
    int experts, hidden, top_k, groups, top_groups;
    bool normalize;
};

std::vector<RouteShape> route_shapes() {
    const auto sigmoid = Scoring::sigmoid_noaux_tc, softmax = Scoring::softmax_greedy;
    std::vector<RouteShape> list = {
        {sigmoid, 8, 64, 2, 1, 1, true},
        {sigmoid, 48, 96, 6, 8, 3, true},
        {softmax, 40, 72, 5, 1, 1, false},
        {softmax, 64, 64, 6, 8, 3, false},
        // a last row tile that is alone and ragged, cuts of several steps, columns
        // that are no multiple of a step or of 16 bytes; too wide for one cluster
        {sigmoid, 100, 1100, 8, 1, 1, true},
        {sigmoid, 300, 333, 8, 1, 1, true},
        {softmax, 20, 8264, 3, 1, 1, false}};
    if (!options().small) {
        list.push_back({sigmoid, 384, 7168, 8, 1, 1, true});
        list.push_back({sigmoid, 256, 7168, 8, 8, 4, true});
        list.push_back({sigmoid, 64, 2048, 6, 1, 1, true});
    }
    return list;
}

struct Routed {
    std::vector<int> expert;
    std::vector<double> weight;
    double margin;  // how far the nearest choice was from going the other way
};

Routed reference_route(const RouteShape& s, const std::vector<double>& logits, const std::vector<float>& bias,
                       double scaling) {
    const size_t n = static_cast<size_t>(s.experts);
    std::vector<double> score(n), choice(n);
    if (s.scoring == Scoring::sigmoid_noaux_tc) {
        for (size_t e = 0; e < n; ++e) {
            score[e] = 1.0 / (1.0 + std::exp(-logits[e]));
            choice[e] = score[e] + static_cast<double>(bias[e]);
        }
    } else {
        const double greatest = *std::max_element(logits.begin(), logits.end());
        double sum = 0.0;
        for (size_t e = 0; e < n; ++e) sum += score[e] = std::exp(logits[e] - greatest);
        for (size_t e = 0; e < n; ++e) choice[e] = score[e] /= sum;
    }
    Routed r{{}, {}, 1e9};
    std::vector<bool> open(n, true);
    const size_t each = n / static_cast<size_t>(s.groups);
    if (s.groups > 1) {
        std::vector<double> value;
        for (size_t g = 0; g < static_cast<size_t>(s.groups); ++g) {
            std::vector<double> part(choice.begin() + static_cast<ptrdiff_t>(g * each),
                                     choice.begin() + static_cast<ptrdiff_t>((g + 1) * each));
            std::sort(part.rbegin(), part.rend());
            value.push_back(s.scoring == Scoring::softmax_greedy ? part[0] : part[0] + part[1]);
        }
        std::vector<size_t> order(value.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return value[a] > value[b]; });
        const size_t kept = static_cast<size_t>(s.top_groups);
        r.margin = value[order[kept - 1]] - value[order[kept]];
        for (size_t i = kept; i < order.size(); ++i)
            for (size_t e = order[i] * each; e < (order[i] + 1) * each; ++e) open[e] = false;
    }
    std::vector<size_t> order;
    for (size_t e = 0; e < n; ++e)
        if (open[e]) order.push_back(e);
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return choice[a] > choice[b]; });
    double sum = 0.0;
    for (size_t k = 0; k < static_cast<size_t>(s.top_k); ++k) {
        r.expert.push_back(static_cast<int>(order[k]));
        r.weight.push_back(score[order[k]]);
        sum += score[order[k]];
        if (k + 1 < order.size()) r.margin = std::min(r.margin, choice[order[k]] - choice[order[k + 1]]);
    }
    for (double& w : r.weight) w = (s.normalize ? w / (sum + 1e-20) : w) * scaling;
    return r;
}

}  // namespace

// Bias in the weights, a group too many, normalisation in the wrong place, a tie to the higher id.
KDT_CASE(route_chooses_the_best_experts) {
    Random random(31);
    Backend& b = backend("bf16");
    for (const RouteShape& s : route_shapes())
        for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16}) {
            const TestMatrix m = random_matrix(random, kind, DType::f32, s.experts, s.hidden);
            const Weight gate = b.upload_matrix(m.host(), "gate");
            std::vector<float> bias = random_rows(random, 1, s.experts);
            for (float& v : bias) v *= 0.1f;
            const float* dbias =
                s.scoring == Scoring::sigmoid_noaux_tc ? b.upload_vector(bias, "bias") : nullptr;
            const int pool = 6;
            std::vector<float> x = random_rows(random, pool, s.hidden);
            for (float& v : x) v *= 3.0f;
            const float scaling = 2.5f;
            const auto run = [&](const std::vector<int>& rows, int capacity) {
                std::vector<float> in(static_cast<size_t>(capacity * s.hidden), NAN);
                for (size_t i = 0; i < rows.size(); ++i)
                    for (int c = 0; c < s.hidden; ++c)
                        in[i * static_cast<size_t>(s.hidden) + static_cast<size_t>(c)] =
                            rows[i] < 0 ? garbage(-1 - rows[i], random)
                                        : x[static_cast<size_t>(rows[i] * s.hidden + c)];
                const Device<float> dx(b, in);
                const Device<int32_t> live = scalar(b, rows.size());
                Device<int32_t> expert(b, static_cast<size_t>(capacity * s.top_k));
                Device<float> weight(b, static_cast<size_t>(capacity * s.top_k));
                b.route({{capacity, live.data()},
                         dx.data(),
                         gate,
                         dbias,
                         s.scoring,
                         s.top_k,
                         s.groups,
                         s.top_groups,
                         s.normalize,
                         scaling,
                         expert.data(),
                         weight.data()});
                auto ids = rows_of(expert.get(), static_cast<size_t>(s.top_k), rows.size());
                const auto weights = rows_of(weight.get(), static_cast<size_t>(s.top_k), rows.size());
                for (size_t i = 0; i < ids.size(); ++i) {
                    std::vector<int32_t> chosen(static_cast<size_t>(s.top_k));
                    std::memcpy(chosen.data(), ids[i].data(), chosen.size() * 4);
                    std::sort(chosen.begin(), chosen.end());
                    for (size_t k = 0; k < chosen.size(); ++k)
                        if (chosen[k] < 0 || chosen[k] >= s.experts || (k > 0 && chosen[k] == chosen[k - 1]))
                            failed("row %zu chose expert %d of %d, or one twice", i, chosen[k], s.experts);
                    ids[i].insert(ids[i].end(), weights[i].begin(), weights[i].end());
                }
                return ids;
            };
            int compared = 0;
            for (int i = 0; i < pool; ++i) {
                std::vector<double> logits;
                for (int e = 0; e < s.experts; ++e) {
                    double sum = 0.0;
                    for (int c = 0; c < s.hidden; ++c)
                        sum += static_cast<double>(x[static_cast<size_t>(i * s.hidden + c)]) *
                               static_cast<double>(m.value[static_cast<size_t>(e * s.hidden + c)]);
                    logits.push_back(sum);
                }
                const Routed wanted = reference_route(s, logits, bias, static_cast<double>(scaling));
                if (wanted.margin < 1e-5) continue;
                ++compared;
                const auto row = run({i}, 1)[0];
                const size_t k = static_cast<size_t>(s.top_k);
                std::vector<int32_t> ids(k);
                std::vector<float> weights(k);
                std::memcpy(ids.data(), row.data(), k * 4);
                std::memcpy(weights.data(), row.data() + k * 4, k * 4);
                expect_same(ids, std::vector<int32_t>(wanted.expert.begin(), wanted.expert.end()), "experts");
                std::vector<double> bound;
                for (const double w : wanted.weight) bound.push_back(2e-5 * w);
                expect_near(weights, wanted.weight, bound, "weights");
            }
            if (compared < 3) failed("only %d of %d rows had a clear choice", compared, pool);
            check_purity(format("route of %d experts", s.experts), random, pool, run);
        }
}

// Equal scores must go to the lower id: here every expert has the same weights.
KDT_CASE(route_ties_go_to_the_lower_id) {
    Random random(32);
    Backend& b = backend("bf16");
    const int experts = 96, hidden = 64;
    TestMatrix m = random_matrix(random, WeightKind::f32, DType::f32, experts, hidden);
    for (int e = 1; e < experts; ++e) std::copy_n(m.f32.begin(), hidden, m.f32.begin() + e * hidden);
    const Weight gate = b.upload_matrix(m.host(), "gate");
    const float* bias = b.upload_vector(std::vector<float>(experts, 0.0f), "bias");
    const Device<float> x(b, random_rows(random, 1, hidden));
    const Device<int32_t> live = scalar(b, 1);
    for (const int groups : {1, 8}) {
        Device<int32_t> expert(b, size_t{5});
        Device<float> weight(b, size_t{5});
        b.route({{1, live.data()},
                 x.data(),
                 gate,
                 bias,
                 Scoring::sigmoid_noaux_tc,
                 5,
                 groups,
                 groups > 1 ? 2 : 1,
                 true,
                 1.0f,
                 expert.data(),
                 weight.data()});
        expect_same(expert.get(), std::vector<int32_t>{0, 1, 2, 3, 4}, "experts");
    }
}

namespace {

struct ExpertShape {
    int experts, hidden, inner, top_k;
    WeightKind kind;
    DType scales;
    bool shared;
};

std::vector<ExpertShape> expert_shapes() {
    const auto f = WeightKind::f32, b = WeightKind::bf16, w = WeightKind::w4a16;
    std::vector<ExpertShape> list = {{6, 96, 64, 2, f, DType::f32, true},
                                     {5, 72, 40, 3, b, DType::f32, false},
                                     {9, 96, 32, 4, w, DType::f32, true},
                                     {40, 64, 64, 3, w, DType::bf16, true}};
    if (!options().small) {
        list.push_back({64, 2048, 1408, 6, w, DType::bf16, true});
        list.push_back({12, 7168, 2048, 8, w, DType::bf16, true});
    }
    return list;
}

}  // namespace

// A pair given to the wrong expert or row, slots added in another order, the shared expert added twice, a
// token that feels the other tokens of its expert.
KDT_CASE(experts_sum_their_slots) {
    Random random(33);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        const bool bf16 = precision == "bf16";
        for (const ExpertShape& s : expert_shapes()) {
            std::vector<TestMatrix> gate, up, down;
            std::vector<Weight> wg, wu, wd;
            for (int e = 0; e < s.experts; ++e) {
                gate.push_back(random_matrix(random, s.kind, s.scales, s.inner, s.hidden));
                up.push_back(random_matrix(random, s.kind, s.scales, s.inner, s.hidden));
                down.push_back(random_matrix(random, s.kind, s.scales, s.hidden, s.inner));
                wg.push_back(b.upload_matrix(gate.back().host(), "gate"));
                wu.push_back(b.upload_matrix(up.back().host(), "up"));
                wd.push_back(b.upload_matrix(down.back().host(), "down"));
            }
            const ExpertSet set = b.make_experts(wg, wu, wd, "experts");
            const int pool = options().small ? 5 : 9;
            const std::vector<float> x = random_rows(random, pool, s.hidden),
                                     start = random_rows(random, pool, s.hidden),
                                     shared = random_rows(random, pool, s.hidden);
            std::vector<std::vector<int>> expert;
            std::vector<std::vector<float>> weight;
            for (int i = 0; i < pool; ++i) {
                std::vector<int> ids = random.permutation(s.experts);
                ids.resize(static_cast<size_t>(s.top_k));
                if (i == 1) ids = expert[0];  // an expert with several tokens
                expert.push_back(ids);
                weight.emplace_back();
                for (int k = 0; k < s.top_k; ++k)
                    weight.back().push_back(0.1f + static_cast<float>(random.unit()));
            }
            const size_t hidden = static_cast<size_t>(s.hidden), top_k = static_cast<size_t>(s.top_k);
            const auto run = [&](const std::vector<int>& rows, int capacity) {
                const size_t n = static_cast<size_t>(capacity);
                std::vector<float> in(n * hidden, NAN), more(n * hidden, NAN), slot_weight(n * top_k, NAN);
                std::vector<float> y(rows.size() * hidden);
                std::vector<int32_t> slot_expert(n * top_k, 1 << 30);
                for (size_t i = 0; i < rows.size(); ++i) {
                    const size_t from = static_cast<size_t>(std::max(rows[i], 0));
                    for (size_t c = 0; c < hidden; ++c) {
                        in[i * hidden + c] =
                            rows[i] < 0 ? garbage(-1 - rows[i], random) : x[from * hidden + c];
                        more[i * hidden + c] = shared[from * hidden + c];
                        y[i * hidden + c] = start[from * hidden + c];
                    }
                    const std::vector<int> other = random.permutation(s.experts);
                    for (size_t k = 0; k < top_k; ++k) {
                        slot_expert[i * top_k + k] = rows[i] < 0 ? other[k] : expert[from][k];
                        slot_weight[i * top_k + k] = weight[from][k];
                    }
                }
                const Device<float> dx(b, in), ds(b, more), dw(b, slot_weight);
                const Device<int32_t> de(b, slot_expert), live = scalar(b, rows.size());
                Device<float> dy(b, n * hidden);
                dy.set(y);
                b.experts({{capacity, live.data()},
                           dx.data(),
                           set,
                           de.data(),
                           dw.data(),
                           s.top_k,
                           s.shared ? ds.data() : nullptr,
                           dy.data()});
                return rows_of(dy.get(), hidden, rows.size());
            };
            const std::string what = format("%s, %d experts of [%d, %d], top %d", precision.c_str(),
                                            s.experts, s.inner, s.hidden, s.top_k);
            for (int i = 0; i < std::min(pool, 3); ++i) {
                const std::vector<float> got = floats_of(run({i}, 1)[0]);
                const size_t at = static_cast<size_t>(i);
                std::vector<double> wanted(hidden), bound(hidden);
                for (size_t c = 0; c < hidden; ++c)
                    wanted[c] = static_cast<double>(start[at * hidden + c]) +
                                (s.shared ? static_cast<double>(shared[at * hidden + c]) : 0.0);
                for (size_t k = 0; k < top_k; ++k) {
                    const size_t e = static_cast<size_t>(expert[at][k]);
                    std::vector<double> act(static_cast<size_t>(s.inner));
                    for (size_t n = 0; n < act.size(); ++n) {
                        double g = 0.0, u = 0.0;
                        for (size_t c = 0; c < hidden; ++c) {
                            const double v = static_cast<double>(bf16 ? bf16_round(x[at * hidden + c])
                                                                      : x[at * hidden + c]);
                            const bool round = bf16 && s.kind == WeightKind::f32;
                            const float wg1 = gate[e].value[n * hidden + c],
                                        wu1 = up[e].value[n * hidden + c];
                            g += v * static_cast<double>(round ? bf16_round(wg1) : wg1);
                            u += v * static_cast<double>(round ? bf16_round(wu1) : wu1);
                        }
                        act[n] = g / (1.0 + std::exp(-g)) * u;
                    }
                    for (size_t c = 0; c < hidden; ++c) {
                        double sum = 0.0, size = 0.0;
                        for (size_t n = 0; n < act.size(); ++n) {
                            const double term =
                                act[n] * static_cast<double>(down[e].value[c * act.size() + n]);
                            sum += term;
                            size += std::fabs(term);
                        }
                        const double w = static_cast<double>(weight[at][k]);
                        wanted[c] += w * sum;
                        bound[c] += w * size * (bf16 ? 0x1p-8 : 4e-6) + 1e-6;
                    }
                }
                expect_near(got, wanted, bound, what);
            }
            check_purity(what, random, pool, run);
        }
    }
}

// More pairs than a block sorts at once, more experts than pairs: a pair lost, given twice, or to another
// expert.
KDT_CASE(experts_of_many_pairs) {
    Random random(34);
    Backend& b = backend("f32");
    struct Shape {
        int experts, rows, top_k;
    };
    for (const Shape s : {Shape{12, 300, 4}, Shape{700, 80, 8}, Shape{40, 400, 2}}) {
        const int hidden = 32, inner = 16, pool = 4;
        std::vector<Weight> gate, up, down;
        for (int e = 0; e < s.experts; ++e) {
            const auto load = [&](int out, int in) {
                return b.upload_matrix(random_matrix(random, WeightKind::f32, DType::f32, out, in).host(),
                                       "e");
            };
            gate.push_back(load(inner, hidden));
            up.push_back(load(inner, hidden));
            down.push_back(load(hidden, inner));
        }
        const ExpertSet set = b.make_experts(gate, up, down, "experts");
        const std::vector<float> x = random_rows(random, pool, hidden);
        std::vector<std::vector<int>> expert;
        for (int i = 0; i < pool; ++i) {
            expert.push_back(random.permutation(s.experts));
            expert.back().resize(static_cast<size_t>(s.top_k));
        }
        const auto run = [&](const std::vector<int>& rows) {
            std::vector<float> in;
            std::vector<int32_t> ids;
            for (const int row : rows) {
                in.insert(in.end(), x.begin() + row * hidden, x.begin() + (row + 1) * hidden);
                ids.insert(ids.end(), expert[static_cast<size_t>(row)].begin(),
                           expert[static_cast<size_t>(row)].end());
            }
            const size_t n = rows.size();
            const Device<float> dx(b, in), weight(b, std::vector<float>(ids.size(), 0.5f));
            const Device<int32_t> de(b, ids), live = scalar(b, n);
            Device<float> y(b, std::vector<float>(n * hidden, 0.0f));
            b.experts({{static_cast<int>(n), live.data()},
                       dx.data(),
                       set,
                       de.data(),
                       weight.data(),
                       s.top_k,
                       nullptr,
                       y.data()});
            return rows_of(y.get(), hidden, n);
        };
        std::vector<std::vector<uint8_t>> alone;
        for (int i = 0; i < pool; ++i) alone.push_back(run({i})[0]);
        std::vector<int> rows;
        for (int i = 0; i < s.rows; ++i) rows.push_back(random.below(pool));
        const auto together = run(rows);
        for (size_t i = 0; i < rows.size(); ++i)
            expect_same(together[i], alone[static_cast<size_t>(rows[i])],
                        format("row %zu of %d, %d experts", i, s.rows, s.experts));
    }
}

}  // namespace kdt::testing
