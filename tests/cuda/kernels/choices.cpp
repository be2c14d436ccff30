// Choices where the rule has an edge: ties, filters that keep a known set, borders of the vocabulary, scores
// that saturate.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "testing.h"

namespace kdt::testing {

namespace {

// The token after each of `rows` equal rows at positions first, first + 1, ...
std::vector<int32_t> draw(Backend& b, const std::vector<float>& row, int rows, int first,
                          const SampleParams& s) {
    std::vector<float> logits;
    std::vector<int32_t> position;
    for (int i = 0; i < rows; ++i) {
        logits.insert(logits.end(), row.begin(), row.end());
        position.push_back(first + i);
    }
    const Device<float> x(b, logits);
    const Device<int32_t> at(b, position), live = scalar(b, static_cast<size_t>(rows));
    const Device<SampleParams> params(b, std::vector<SampleParams>{s});
    Device<int32_t> token(b, static_cast<size_t>(rows));
    b.select({{rows, live.data()},
              x.data(),
              static_cast<int>(row.size()),
              at.data(),
              params.data(),
              token.data()});
    return token.get();
}

SampleParams sampling(Random& random) {
    SampleParams s;
    s.temperature = 1.0f;
    s.seed = random.bits();
    return s;
}

// Every token that may come has come in 192 draws (they are four at most, and equally likely), and no other.
// An emulated draw takes long: three there, and none that may not come.
void expect_support(const SampleParams& s, const std::vector<float>& row, const std::set<int32_t>& wanted,
                    const std::string& what) {
    Backend& b = backend("bf16");
    std::set<int32_t> got;
    for (int turn = 0; turn < (options().small ? 1 : 3); ++turn)
        for (const int32_t t : draw(b, row, options().small ? 3 : 64, 1000 * turn, s)) got.insert(t);
    std::vector<int32_t> expected(wanted.begin(), wanted.end());
    if (options().small) std::erase_if(expected, [&](int32_t t) { return !got.contains(t); });
    expect_same(std::vector<int32_t>(got.begin(), got.end()), expected, what);
}

std::vector<int> real_vocabularies() {
    return options().small ? std::vector<int>{260} : std::vector<int>{260, 4099, 163840};
}

}  // namespace

// Of equal logits at the border of top-k the higher ids kept, or all of them.
KDT_CASE(top_k_filter_cuts_ties_by_id) {
    Random random(91);
    for (const int vocab : real_vocabularies()) {
        std::vector<float> row(static_cast<size_t>(vocab), -1.0f);
        std::vector<int> ids = random.permutation(vocab);
        ids.resize(40);
        for (const int id : ids) row[static_cast<size_t>(id)] = 3.0f;
        std::sort(ids.begin(), ids.end());
        for (const int k : {1, 3, 4}) {
            SampleParams s = sampling(random);
            s.top_k = k;
            expect_support(s, row, std::set<int32_t>(ids.begin(), ids.begin() + k),
                           format("vocabulary %d, %d of 40 equal tokens", vocab, k));
        }
        // a greater one before them takes the first place
        row[static_cast<size_t>(ids[39])] = 3.25f;
        SampleParams s = sampling(random);
        s.top_k = 3;
        expect_support(s, row, {ids[0], ids[1], ids[39]}, "one greater and two of 39 equal tokens");
    }
}

// The token that crosses top-p dropped, or one more than it kept: masses that are exact in binary.
KDT_CASE(top_p_filter_keeps_the_crossing_token) {
    Random random(92);
    for (const int vocab : real_vocabularies()) {
        std::vector<float> row(static_cast<size_t>(vocab), -INFINITY);
        std::vector<int> ids = random.permutation(vocab);
        ids.resize(4);
        for (const int id : ids) row[static_cast<size_t>(id)] = -2.0f;
        std::sort(ids.begin(), ids.end());
        std::vector<std::pair<float, int>> list = {{0.5f, 2}};
        if (!options().small)
            list.insert(list.end(),
                        {{0.1f, 1}, {0.25f, 1}, {0.2501f, 2}, {0.51f, 3}, {0.75f, 3}, {0.76f, 4}});
        for (const auto& [p, kept] : list) {
            SampleParams s = sampling(random);
            s.top_p = p;
            expect_support(s, row, std::set<int32_t>(ids.begin(), ids.begin() + kept),
                           format("vocabulary %d, top_p %g", vocab, static_cast<double>(p)));
        }
        SampleParams s = sampling(random);  // of what top-k left: two of two
        s.top_k = 2;
        s.top_p = 0.51f;
        expect_support(s, row, {ids[0], ids[1]}, "top_p after top_k");
    }
}

// min-p that compares with the whole mass instead of the greatest probability, or drops equals of the
// greatest.
KDT_CASE(min_p_filter_compares_with_the_greatest) {
    Random random(93);
    for (const int vocab : real_vocabularies()) {
        std::vector<float> row(static_cast<size_t>(vocab), -9.0f);
        std::vector<int> ids = random.permutation(vocab);
        ids.resize(4);
        std::sort(ids.begin(), ids.end());
        row[static_cast<size_t>(ids[0])] = row[static_cast<size_t>(ids[2])] = 2.0f;
        row[static_cast<size_t>(ids[1])] = row[static_cast<size_t>(ids[3])] = 1.5f;  // exp(-0.5) = 0.61
        SampleParams s = sampling(random);
        s.min_p = 1.0f;
        expect_support(s, row, {ids[0], ids[2]}, "min_p of one");
        s.min_p = 0.6f;
        expect_support(s, row, {ids[0], ids[1], ids[2], ids[3]}, "min_p below the second pair");
        s.min_p = 0.62f;
        expect_support(s, row, {ids[0], ids[2]}, "min_p above the second pair");
    }
}

// A greatest logit that is missed where threads, vectors or blocks meet, or at the ragged end.
KDT_CASE(greedy_finds_the_greatest_at_every_border) {
    Random random(94);
    Backend& b = backend("bf16");
    for (const int vocab :
         options().small ? std::vector<int>{2051} : std::vector<int>{4099, 163840, 163841}) {
        std::set<int> places = {0, 1, 2, 3, 4, vocab - 1, vocab - 2, vocab - 3, vocab - 4, vocab - 5};
        for (const int step : {32, 128, 1024, 2048, 4096, 20480, 81920})
            for (const int at : {step - 1, step, step + 1, vocab / step * step - 1, vocab / step * step})
                if (at >= 0 && at < vocab) places.insert(at);
        std::vector<float> logits;
        std::vector<int32_t> wanted;
        for (const int at : places) {
            std::vector<float> row(static_cast<size_t>(vocab));
            for (float& v : row) v = random.symmetric();
            row[static_cast<size_t>(at)] = 1.5f;
            logits.insert(logits.end(), row.begin(), row.end());
            wanted.push_back(at);
        }
        const int rows = static_cast<int>(wanted.size());
        const Device<float> x(b, logits);
        const Device<int32_t> position(b, std::vector<int32_t>(wanted.size(), 0)),
            live = scalar(b, wanted.size());
        const Device<SampleParams> params(b, std::vector<SampleParams>{SampleParams{}});
        Device<int32_t> token(b, wanted.size());
        b.select({{rows, live.data()}, x.data(), vocab, position.data(), params.data(), token.data()});
        expect_same(token.get(), wanted, format("vocabulary of %d", vocab));
    }
}

// Noise that is not Gumbel's, of a short period, or the same at neighbouring positions: 2,560 draws against
// the probabilities.
KDT_CASE(draws_follow_the_probabilities) {
    Random random(95);
    Backend& b = backend("bf16");
    const std::vector<double> mass = {5, 1, 3, 0, 4, 2, 1};
    std::vector<float> row;
    for (const double m : mass) row.push_back(m == 0.0 ? -INFINITY : static_cast<float>(std::log(m)));
    const SampleParams s = sampling(random);
    std::vector<double> seen(mass.size(), 0.0);
    const int draws = options().small ? 64 : 2560;
    int repeats = 0;
    for (int first = 0; first < draws; first += 64) {
        const std::vector<int32_t> got = draw(b, row, 64, first, s);
        for (size_t i = 0; i < got.size(); ++i) {
            if (got[i] < 0 || got[i] == 3 || got[i] >= static_cast<int32_t>(mass.size()))
                failed("token %d", got[i]);
            seen[static_cast<size_t>(got[i])] += 1.0;
            repeats += i > 0 && got[i] == got[i - 1];
        }
    }
    double chi = 0.0, same = 0.0;
    for (size_t t = 0; t < mass.size(); ++t) {
        const double p = mass[t] / 16.0;
        same += p * p;
        if (p > 0.0) chi += (seen[t] - p * draws) * (seen[t] - p * draws) / (p * draws);
    }
    count_checks(2);
    if (chi > 25.0) failed("chi squared is %.1f with five degrees of freedom", chi);
    const double expected = same * draws * 63 / 64;
    if (std::fabs(repeats - expected) > 5.0 * std::sqrt(expected))
        failed("%d neighbours were alike; about %.0f were expected", repeats, expected);
}

namespace {

struct Routed {
    std::vector<int32_t> expert;
    std::vector<float> weight;
};

// Logits of one row, by a gate whose first column holds them.
Routed route(const std::vector<float>& logits, const std::vector<float>& bias, Scoring scoring, int top_k,
             int groups, int top_groups, bool normalize) {
    Backend& b = backend("bf16");
    const int experts = static_cast<int>(logits.size()), hidden = 64;
    TestMatrix m;
    m.kind = WeightKind::f32;
    m.scale_dtype = DType::f32;
    m.out = experts;
    m.in = hidden;
    m.f32.assign(logits.size() * hidden, 0.0f);
    for (size_t e = 0; e < logits.size(); ++e) m.f32[e * hidden] = logits[e];
    const Weight gate = b.upload_matrix(m.host(), "gate");
    const float* dbias = scoring == Scoring::sigmoid_noaux_tc ? b.upload_vector(bias, "bias") : nullptr;
    std::vector<float> x(hidden, 0.5f);
    x[0] = 1.0f;
    const Device<float> dx(b, x);
    const Device<int32_t> live = scalar(b, 1);
    Device<int32_t> expert(b, static_cast<size_t>(top_k));
    Device<float> weight(b, static_cast<size_t>(top_k));
    b.route({{1, live.data()},
             dx.data(),
             gate,
             dbias,
             scoring,
             top_k,
             groups,
             top_groups,
             normalize,
             2.0f,
             expert.data(),
             weight.data()});
    return {expert.get(), weight.get()};
}

}  // namespace

// NaN or infinity from scores that are all zero or one in float32, ties of them to other than the lowest ids.
KDT_CASE(route_of_saturated_scores) {
    const std::vector<float> none(48, 0.0f);
    for (const float level : {-300.0f, 300.0f}) {
        const Routed r = route(std::vector<float>(48, level), none, Scoring::sigmoid_noaux_tc, 4, 1, 1, true);
        expect_same(r.expert, {0, 1, 2, 3}, format("logits of %g", static_cast<double>(level)));
        expect_same(r.weight, std::vector<float>(4, level < 0.0f ? 0.0f : 0.5f), "weights");
    }
    std::vector<float> logits(48, -1e30f);
    logits[17] = 1e30f;
    const Routed r = route(logits, none, Scoring::softmax_greedy, 3, 1, 1, false);
    expect_same(r.expert, {17, 0, 1}, "one expert far above the others");
    expect_same(r.weight, {2.0f, 0.0f, 0.0f}, "weights");
}

// The correction bias in a weight, or left out of the choice.
KDT_CASE(route_bias_chooses_and_does_not_weigh) {
    Random random(97);
    std::vector<float> logits(40), bias(40, 0.0f);
    for (float& v : logits) v = random.symmetric();
    bias[5] = 30.0f;
    bias[39] = 20.0f;
    bias[12] = 10.0f;
    const Routed r = route(logits, bias, Scoring::sigmoid_noaux_tc, 3, 1, 1, true);
    expect_same(r.expert, {5, 39, 12}, "experts");
    std::vector<double> wanted, bound;
    double sum = 0.0;
    for (const size_t e : {5, 39, 12}) {
        wanted.push_back(1.0 / (1.0 + std::exp(-static_cast<double>(logits[e]))));
        sum += wanted.back();
    }
    for (double& w : wanted) w *= 2.0 / sum, bound.push_back(2e-5 * w);
    expect_near(r.weight, wanted, bound, "weights");
}

// An expert of a group that was not chosen; of equal groups the higher one; a group judged by its best expert
// where two count, or by two where one does.
KDT_CASE(route_stays_inside_its_groups) {
    const std::vector<float> none(32, 0.0f);  // groups of four
    std::vector<float> logits(32, -4.0f);
    logits[9] = 3.0f;                // group 2: one great expert
    logits[20] = logits[21] = 2.5f;  // group 5: two good ones
    logits[28] = logits[29] = 2.5f;  // group 7: the same
    Routed r = route(logits, none, Scoring::sigmoid_noaux_tc, 2, 8, 1, true);
    expect_same(r.expert, {20, 21}, "sigmoid scores: a group counts its two best");
    r = route(logits, none, Scoring::softmax_greedy, 2, 8, 1, false);
    expect_same(r.expert, {9, 8}, "softmax scores: a group counts its best");
    r = route(logits, none, Scoring::sigmoid_noaux_tc, 4, 8, 2, true);
    expect_same(r.expert, {20, 21, 28, 29}, "two groups");
    r = route(std::vector<float>(32, 0.5f), none, Scoring::sigmoid_noaux_tc, 6, 8, 2, true);
    expect_same(r.expert, {0, 1, 2, 3, 4, 5}, "all equal");
}

}  // namespace kdt::testing
