// select and top_k.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "testing.h"

namespace kdt::testing {

namespace {

std::vector<int> vocabularies() {
    return options().small ? std::vector<int>{5, 700, 9001}
                           : std::vector<int>{5, 97, 1000, 32001, 163840, 170003};
}

std::vector<float> random_logits(Random& random, int vocab, bool ties) {
    std::vector<float> x(static_cast<size_t>(vocab));
    for (float& v : x) {
        v = random.symmetric() * 6.0f;
        if (ties) v = std::round(v);
    }
    return x;
}

uint32_t philox(uint32_t token, uint32_t position, uint32_t choice, uint64_t seed) {
    uint32_t c[4] = {token, position, choice, 0};
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53u} * c[0], p1 = uint64_t{0xCD9E8D57u} * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
                                  static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        std::copy_n(next, 4, c);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c[0];
}

struct Selected {
    int token;
    double margin;  // how far the nearest decision was from going the other way
};

Selected reference_select(const std::vector<float>& x, int position, const SampleParams& s) {
    std::vector<int> order(x.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int a, int b) { return x[static_cast<size_t>(a)] > x[static_cast<size_t>(b)]; });
    const double greatest = static_cast<double>(x[static_cast<size_t>(order[0])]);
    std::vector<double> z, p;
    for (const int id : order) {
        z.push_back((static_cast<double>(x[static_cast<size_t>(id)]) - greatest) /
                    static_cast<double>(s.temperature));
        p.push_back(std::exp(z.back()));
    }
    size_t kept = order.size();
    if (s.top_k > 0) kept = std::min(kept, static_cast<size_t>(s.top_k));
    double margin = 1e9;
    if (s.top_p < 1.0f) {
        const double total = std::accumulate(p.begin(), p.begin() + static_cast<ptrdiff_t>(kept), 0.0);
        double before = 0.0;
        size_t n = 0;
        while (n < kept && before < static_cast<double>(s.top_p) * total) {
            before += p[n++];
            margin = std::min(margin, std::fabs(before / total - static_cast<double>(s.top_p)));
        }
        kept = n;
    }
    Selected best{-1, margin};
    double value = -1e300;
    for (size_t i = 0; i < kept; ++i) {
        if (s.min_p > 0.0f) {
            best.margin = std::min(best.margin, std::fabs(p[i] - static_cast<double>(s.min_p)));
            if (p[i] < static_cast<double>(s.min_p)) continue;
        }
        const uint32_t word =
            philox(static_cast<uint32_t>(order[i]), static_cast<uint32_t>(position + 1), s.choice, s.seed);
        const float v = std::min((static_cast<float>(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
        const double noisy = z[i] - std::log(-std::log1p(-static_cast<double>(v)));
        if (noisy > value) {
            best.margin = std::min(margin, noisy - value);
            best.token = order[i];
            value = noisy;
        } else {
            best.margin = std::min(best.margin, value - noisy);
        }
    }
    return best;
}

std::vector<int32_t> select(Backend& b, const std::vector<std::vector<float>>& rows,
                            const std::vector<int32_t>& position, const SampleParams& sample, int padding) {
    const size_t vocab = rows[0].size(), capacity = rows.size() + static_cast<size_t>(padding);
    std::vector<float> all(capacity * vocab, NAN);
    for (size_t i = 0; i < rows.size(); ++i)
        std::copy(rows[i].begin(), rows[i].end(), all.begin() + static_cast<ptrdiff_t>(i * vocab));
    std::vector<int32_t> at(position);
    at.resize(capacity, 0);
    const Device<float> logits(b, all);
    const Device<int32_t> positions(b, at), live = scalar(b, rows.size());
    const Device<SampleParams> params(b, std::vector<SampleParams>{sample});
    Device<int32_t> token(b, capacity);
    b.select({{static_cast<int>(capacity), live.data()},
              logits.data(),
              static_cast<int>(vocab),
              positions.data(),
              params.data(),
              token.data()});
    std::vector<int32_t> got = token.get();
    rows_of(got, 1, rows.size());
    got.resize(rows.size());
    return got;
}

}  // namespace

// A maximum that is missed at a border of threads or blocks, a tie to the higher id, NaN that wins.
KDT_CASE(greedy_select) {
    Random random(41);
    Backend& b = backend("bf16");
    for (const int vocab : vocabularies()) {
        std::vector<std::vector<float>> rows;
        std::vector<int32_t> wanted;
        for (int i = 0; i < 12; ++i) {
            rows.push_back(random_logits(random, vocab, i % 2 == 1));
            std::vector<float>& x = rows.back();
            const size_t n = x.size();
            if (i == 2) x[n - 1] = 50.0f;
            if (i == 4) x[0] = 50.0f;
            if (i == 6) std::fill(x.begin(), x.end(), -0.0f), x[n / 2] = 0.0f;
            if (i == 8) std::fill(x.begin(), x.end(), -INFINITY), x[n / 2] = -1e30f;
            if (i == 9) x[n / 3] = NAN;
            if (i == 10) std::fill(x.begin(), x.end(), -INFINITY);
            if (i == 11) x[n / 3] = INFINITY;
            wanted.push_back(static_cast<int32_t>(std::max_element(x.begin(), x.end()) - x.begin()));
            if (i == 9 || i == 10) wanted.back() = -1;
        }
        expect_same(select(b, rows, std::vector<int32_t>(12, 5), SampleParams{}, 3), wanted,
                    format("vocabulary of %d", vocab));
    }
}

// A filter that keeps one token too many or too few, noise of the wrong position, a choice that feels other
// rows.
KDT_CASE(sampled_select) {
    Random random(42);
    Backend& b = backend("bf16");
    int clear = 0, all = 0, skipped = 0;
    for (const int vocab : vocabularies()) {
        std::vector<SampleParams> params;
        for (const int top_k : {0, 1, 3, 40})
            for (const float top_p : {1.0f, 0.9f, 0.3f})
                for (const float min_p : {0.0f, 0.05f}) {
                    SampleParams s;
                    s.temperature = top_k == 3 ? 0.3f : 1.1f;
                    s.top_k = top_k;
                    s.top_p = top_p;
                    s.min_p = min_p;
                    s.seed = random.bits();
                    s.choice = static_cast<uint32_t>(random.below(4));
                    params.push_back(s);
                }
        for (const SampleParams& s : params) {
            if (options().small && skipped++ % 6 != 0) continue;
            std::vector<std::vector<float>> rows;
            std::vector<int32_t> position;
            for (int i = 0; i < 5; ++i) {
                rows.push_back(random_logits(random, vocab, i % 2 == 1));
                position.push_back(random.below(100000));
            }
            rows[3][static_cast<size_t>(vocab / 2)] = -INFINITY;
            rows[4][static_cast<size_t>(vocab / 3)] = NAN;
            const std::vector<int32_t> got = select(b, rows, position, s, 2);
            for (size_t i = 0; i < rows.size(); ++i) {
                expect_same(select(b, {rows[i]}, {position[i]}, s, 0), {got[i]}, "a row alone");
                if (i == 4) {
                    expect_same<int32_t>({got[i]}, {-1}, "a row with a NaN");
                    continue;
                }
                const Selected wanted = reference_select(rows[i], position[i], s);
                ++all;
                if (wanted.margin < 1e-4) continue;
                ++clear;
                expect_same<int32_t>(
                    {got[i]}, {wanted.token},
                    format("vocabulary %d, temperature %g, top_k %d, top_p %g, min_p %g, row %zu", vocab,
                           static_cast<double>(s.temperature), s.top_k, static_cast<double>(s.top_p),
                           static_cast<double>(s.min_p), i));
            }
        }
    }
    if (clear * 2 < all) failed("only %d of %d choices were clear", clear, all);
}

// Rows that leave the quick way to a set of tokens: more equals than a list of candidates holds, a mass that
// no short list reaches, fewer finite tokens than are asked for, logits that lie on top of one another or far
// apart.
KDT_CASE(select_from_rows_without_a_short_list) {
    Random random(44);
    Backend& b = backend("bf16");
    const int vocab = 3003;
    const size_t n = static_cast<size_t>(vocab);
    std::vector<std::vector<float>> rows;
    rows.emplace_back(n, 0.0f);  // all equal
    for (size_t i = 0; i < n; i += 2) rows[0][i] = -0.0f;
    rows.emplace_back(n, -INFINITY);  // ten tokens
    for (int i = 0; i < 10; ++i) rows[1][static_cast<size_t>(random.below(vocab))] = random.symmetric();
    rows.emplace_back(n);  // flat
    for (float& v : rows[2]) v = 1e-3f * random.symmetric();
    rows.emplace_back(n);  // neighbouring floats
    for (float& v : rows[3]) v = 1.0f + 0x1p-23f * static_cast<float>(random.below(200));
    rows.emplace_back(n);  // far apart
    for (float& v : rows[4]) v = 1e4f * random.symmetric();
    rows.push_back(random_logits(random, vocab, false));  // 2,047 and 2,500 equals behind one greater
    std::fill(rows[5].begin(), rows[5].begin() + 2047, 7.0f);
    rows[5][3000] = 8.0f;
    rows.push_back(rows[5]);
    std::fill(rows[6].begin(), rows[6].begin() + 2500, 7.0f);
    rows.push_back(random_logits(random, vocab, false));  // infinite
    rows[7][17] = INFINITY;
    int clear = 0;
    std::vector<std::pair<int, float>> filters = {{0, 0.35f}, {40, 0.55f}, {1500, 1.0f}};
    if (!options().small) filters.insert(filters.end(), {{0, 1.0f}, {40, 1.0f}, {1000, 0.7f}, {3000, 0.6f}});
    for (const auto& [top_k, top_p] : filters) {
        SampleParams s;
        s.temperature = 0.9f;
        s.top_k = top_k;
        s.top_p = top_p;
        s.seed = random.bits();
        const std::vector<int32_t> position(rows.size(), 77), got = select(b, rows, position, s, 1);
        for (size_t i = 0; i < rows.size(); ++i) {
            if (i == 7) {
                expect_same<int32_t>({got[i]}, {17}, "an infinite logit");
                continue;
            }
            const Selected wanted = reference_select(rows[i], 77, s);
            if (wanted.margin < 2e-5) continue;
            ++clear;
            expect_same<int32_t>({got[i]}, {wanted.token},
                                 format("row %zu, top_k %d, top_p %g", i, top_k, static_cast<double>(top_p)));
        }
    }
    if (clear < 4 * static_cast<int>(filters.size())) failed("only %d choices were clear", clear);

    const int k = 64;
    for (size_t i = 0; i < 7; ++i) {
        const Device<float> logits(b, rows[i]);
        const Device<int32_t> live = scalar(b, 1);
        Device<int32_t> token(b, size_t{k});
        Device<float> logp(b, size_t{k});
        b.top_k({{1, live.data()}, logits.data(), vocab, k, token.data(), logp.data()});
        std::vector<int32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) {
            return rows[i][static_cast<size_t>(x)] > rows[i][static_cast<size_t>(y)];
        });
        order.resize(k);
        expect_same(token.get(), order, format("the %d best of row %zu", k, i));
    }
}

// Order, ties at the border, the normaliser over the whole row.
KDT_CASE(top_k_tokens) {
    Random random(43);
    Backend& b = backend("bf16");
    for (const int vocab : vocabularies())
        for (const int k : {1, 4, 64}) {
            if (k > vocab) continue;
            const int live_rows = 6;
            std::vector<float> all;
            for (int i = 0; i < live_rows + 2; ++i) {
                std::vector<float> x = random_logits(random, vocab, i % 2 == 1);
                if (i == 4) x[static_cast<size_t>(vocab / 2)] = NAN;
                all.insert(all.end(), x.begin(), x.end());
            }
            const Device<float> logits(b, all);
            const Device<int32_t> live = scalar(b, live_rows);
            const size_t each = static_cast<size_t>(k);
            Device<int32_t> token(b, (live_rows + 2) * each);
            Device<float> logp(b, (live_rows + 2) * each);
            b.top_k({{live_rows + 2, live.data()}, logits.data(), vocab, k, token.data(), logp.data()});
            const auto tokens = rows_of(token.get(), each, live_rows),
                       logps = rows_of(logp.get(), each, live_rows);
            for (size_t i = 0; i < live_rows; ++i) {
                const float* x = all.data() + i * static_cast<size_t>(vocab);
                std::vector<int32_t> order(static_cast<size_t>(vocab)), got(each);
                std::iota(order.begin(), order.end(), 0);
                std::memcpy(got.data(), tokens[i].data(), each * 4);
                std::vector<float> got_logp(each);
                std::memcpy(got_logp.data(), logps[i].data(), each * 4);
                if (i == 4) {
                    order.resize(each);
                    expect_same(got, order, "tokens of a row with a NaN");
                    for (const float v : got_logp)
                        if (v == v) failed("a row with a NaN has log-probability %g", static_cast<double>(v));
                    continue;
                }
                std::stable_sort(order.begin(), order.end(), [&](int a, int c) { return x[a] > x[c]; });
                double sum = 0.0;
                for (int n = 0; n < vocab; ++n)
                    sum += std::exp(static_cast<double>(x[n]) - static_cast<double>(x[order[0]]));
                std::vector<double> wanted;
                for (size_t j = 0; j < each; ++j)
                    wanted.push_back(static_cast<double>(x[order[j]]) - static_cast<double>(x[order[0]]) -
                                     std::log(sum));
                order.resize(each);
                expect_same(got, order, format("vocabulary %d, k %d", vocab, k));
                expect_near(got_logp, wanted, std::vector<double>(each, 1e-5),
                            format("vocabulary %d, k %d", vocab, k));
            }
        }
}

}  // namespace kdt::testing
