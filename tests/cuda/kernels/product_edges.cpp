// Products and experts at ragged shapes and with values at the ends of their range.
#include <algorithm>
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

std::vector<float> whole_rows(Random& random, int rows, int width) {
    std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(width));
    for (float& v : x) v = static_cast<float>(random.between(-8, 8));
    return x;
}

std::vector<float> linear(Backend& b, const TestMatrix& m, const std::vector<float>& x) {
    const size_t rows = x.size() / static_cast<size_t>(m.in);
    const Weight w = b.upload_matrix(m.host(), "w");
    const Device<float> dx(b, x);
    const Device<int32_t> live = scalar(b, rows);
    Device<float> y(b, (rows + 1) * static_cast<size_t>(m.out));
    b.linear({{static_cast<int>(rows) + 1, live.data()}, dx.data(), w, y.data(), false});
    std::vector<float> all = y.get();
    rows_of(all, static_cast<size_t>(m.out), rows);
    all.resize(rows * static_cast<size_t>(m.out));
    return all;
}

// Whole numbers: the product is exact, in whatever order it is summed.
std::vector<float> exact_product(const TestMatrix& m, const std::vector<float>& x) {
    const size_t in = static_cast<size_t>(m.in), rows = x.size() / in;
    std::vector<float> y;
    for (size_t i = 0; i < rows; ++i)
        for (size_t n = 0; n < static_cast<size_t>(m.out); ++n) {
            double sum = 0.0;
            for (size_t k = 0; k < in; ++k)
                sum += static_cast<double>(x[i * in + k]) * static_cast<double>(m.value[n * in + k]);
            y.push_back(static_cast<float>(sum));
        }
    return y;
}

void exact_linear(WeightKind kind, DType scales, const std::vector<int>& outs, const std::vector<int>& ins,
                  const char* name) {
    Random random(101);
    for (const std::string precision : {"bf16", "f32"})
        for (const int in : ins)
            for (const int out : outs) {
                const TestMatrix m = random_matrix(random, kind, scales, out, in, true);
                for (const int rows : {1, 9, 17}) {
                    const std::vector<float> x = whole_rows(random, rows, in);
                    expect_same(linear(backend(precision), m, x), exact_product(m, x),
                                format("%s, %s [%d, %d], %d rows", precision.c_str(), name, out, in, rows));
                }
            }
}

std::vector<int> wide(std::vector<int> list, int widest) {
    if (!options().small) list.push_back(widest);
    return list;
}

}  // namespace

// A group of 32 columns past the last whole block of 64, or a split whose border falls into it; rows past the
// last whole tile of 16: INT4 with scales of either type.
KDT_CASE(int4_of_ragged_shapes) {
    for (const DType scales : {DType::f32, DType::bf16})
        exact_linear(WeightKind::w4a16, scales, {1, 16, 31}, wide({32, 96, 1056}, 7200),
                     scales == DType::f32 ? "w4/f32" : "w4/bf16");
}

// bf16 and float32 matrices whose rows end inside a tile of 16 and whose columns inside a vector, a step or a
// block.
KDT_CASE(dense_of_ragged_shapes) {
    exact_linear(WeightKind::bf16, DType::f32, {1, 7, 15, 17, 33}, wide({1, 8, 37, 63, 65, 520}, 7172),
                 "bf16");
    exact_linear(WeightKind::f32, DType::f32, {1, 15, 17}, wide({3, 37, 65, 516}, 2052), "f32");
}

// Codes at either end (-8, 7), scales that are negative, zero or far apart between neighbouring groups, a
// matrix of one code: an offset forgotten, a sign lost, a scale of the group beside.
KDT_CASE(int4_of_extreme_codes_and_scales) {
    Random random(102);
    const int out = 20, in = 160;
    for (const std::string precision : {"bf16", "f32"})
        for (const DType scales : {DType::f32, DType::bf16})
            for (const uint32_t code : {0u, 7u, 8u, 9u, 15u, 99u}) {
                TestMatrix m = random_matrix(random, WeightKind::w4a16, scales, out, in, true);
                const size_t groups = in / kGroupSize;
                for (size_t r = 0; r < out; ++r)
                    for (size_t g = 0; g < groups; ++g) {
                        const float choices[] = {0.0f, -1.0f, 0x1p-6f, 64.0f, -0x1p-3f};
                        const float scale = choices[(r + g) % 5];
                        if (scales == DType::f32)
                            m.scales[r * groups + g] = scale;
                        else
                            m.scales16[r * groups + g] = bf16_bits(scale);
                        for (size_t j = 0; j < kGroupSize; ++j) {
                            const size_t at = r * in + g * kGroupSize + j;
                            uint32_t q = m.words[at / 8] >> (at % 8 * 4) & 0xF;
                            if (code < 16) {
                                q = code;
                                m.words[at / 8] =
                                    (m.words[at / 8] & ~(0xFu << (at % 8 * 4))) | q << (at % 8 * 4);
                            }
                            m.value[at] = static_cast<float>(static_cast<int>(q) - 8) * scale;
                        }
                    }
                const std::vector<float> x = whole_rows(random, 5, in);
                std::vector<float> got = linear(backend(precision), m, x), wanted = exact_product(m, x);
                for (float& v : got) v += 0.0f;  // the sign of a zero is not asked for
                for (float& v : wanted) v += 0.0f;
                expect_same(got, wanted, format("%s, code %u", precision.c_str(), code));
            }
}

// K that ends inside a step for gate and up, out inside a tile: a column too many in either, silu of the
// wrong one.
KDT_CASE(gated_of_ragged_shapes) {
    Random random(103);
    for (const std::string precision : {"bf16", "f32"})
        for (const auto& [kind, in] :
             std::vector<std::pair<WeightKind, int>>{{WeightKind::bf16, 37},
                                                     {WeightKind::bf16, 333},
                                                     {WeightKind::f32, 70},
                                                     {WeightKind::w4a16, 32},
                                                     {WeightKind::w4a16, 96},
                                                     {WeightKind::w4a16, options().small ? 544 : 7200}})
            for (const int out : {1, 17}) {
                Backend& b = backend(precision);
                const TestMatrix gate = random_matrix(random, kind, DType::bf16, out, in, true),
                                 up = random_matrix(random, kind, DType::bf16, out, in, true);
                const Weight g = b.upload_matrix(gate.host(), "gate"), u = b.upload_matrix(up.host(), "up");
                const int rows = 3;
                std::vector<float> x = whole_rows(random, rows, in);
                const Device<float> dx(b, x);
                const Device<int32_t> live = scalar(b, rows);
                Device<float> y(b, static_cast<size_t>(rows * out));
                b.gated_linear({{rows, live.data()}, dx.data(), g, u, y.data()});
                const std::vector<float> pg = exact_product(gate, x), pu = exact_product(up, x);
                std::vector<double> wanted, bound;
                for (size_t i = 0; i < pg.size(); ++i) {
                    const double v = static_cast<double>(pg[i]);
                    wanted.push_back(v / (1.0 + std::exp(-v)) * static_cast<double>(pu[i]));
                    bound.push_back(4e-6 * std::fabs(wanted.back()) + 1e-30);
                }
                expect_near(y.get(), wanted, bound, format("%s, gated [%d, %d]", precision.c_str(), out, in));
            }
}

// A NaN or an infinity that is swallowed by a maximum, a clamp or a masked step, or gets into another row.
KDT_CASE(products_carry_nan_to_the_end_of_their_row) {
    Random random(104);
    for (const std::string precision : {"bf16", "f32"})
        for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16, WeightKind::w4a16})
            for (const int rows : {3, 20}) {
                Backend& b = backend(precision);
                const int out = 33, in = 224;
                const TestMatrix m = random_matrix(random, kind, DType::bf16, out, in, true);
                std::vector<float> x = whole_rows(random, rows, in);
                const std::vector<float> clean = linear(b, m, x);
                for (const int column : {0, 63, 64, 223}) {
                    std::vector<float> bad(x);
                    bad[static_cast<size_t>(in + column)] = NAN;
                    std::vector<float> y = linear(b, m, bad);
                    for (int n = 0; n < out; ++n)
                        if (!std::isnan(y[static_cast<size_t>(out + n)]))
                            failed("%s: output %d is %g where column %d of its row is NaN", precision.c_str(),
                                   n, static_cast<double>(y[static_cast<size_t>(out + n)]), column);
                    std::copy_n(clean.begin() + out, out, y.begin() + out);
                    expect_same(y, clean, "the other rows");
                }
            }
}

// An expert that nobody chose, one that one row chose, and one that every row of 65 chose: a list that is not
// emptied, a tile that is lost past 64, an offset of the neighbour; pairs that no block of the expert takes,
// or two take, where there are no lists.
KDT_CASE(experts_of_none_one_and_sixty_five_rows) {
    Random random(105);
    const int experts = 7, hidden = 64, inner = 48, rows = kMaxTreeRows, top_k = 3;
    for (const std::string precision : {"bf16", "f32"})
        for (const WeightKind kind : {WeightKind::bf16, WeightKind::w4a16}) {
            Backend& b = backend(precision);
            const int in = kind == WeightKind::w4a16 ? 64 : inner;
            std::vector<Weight> gate, up, down;
            for (int e = 0; e < experts; ++e) {
                gate.push_back(
                    b.upload_matrix(random_matrix(random, kind, DType::bf16, in, hidden).host(), "gate"));
                up.push_back(
                    b.upload_matrix(random_matrix(random, kind, DType::bf16, in, hidden).host(), "up"));
                down.push_back(
                    b.upload_matrix(random_matrix(random, kind, DType::bf16, hidden, in).host(), "down"));
            }
            const ExpertSet set = b.make_experts(gate, up, down, "experts");
            std::vector<float> x(static_cast<size_t>(rows * hidden)),
                weight(static_cast<size_t>(rows * top_k));
            for (float& v : x) v = random.symmetric();
            for (float& v : weight) v = 0.1f + static_cast<float>(random.unit());
            std::vector<int32_t> expert;  // 4: every row; 2: row 40 alone; 0 and 6: none; 1, 3, 5: the rest
            for (int i = 0; i < rows; ++i) {
                const int32_t rest[] = {1, 3, 5};
                expert.push_back(4);
                expert.push_back(rest[i % 3]);
                expert.push_back(i == 40 ? 2 : rest[(i + 1) % 3]);
                std::rotate(expert.end() - 3, expert.end() - 3 + i % 3, expert.end());
            }
            const auto run = [&](const std::vector<int>& list) {
                std::vector<float> in_rows, w;
                std::vector<int32_t> ids;
                for (const int i : list) {
                    const auto at = static_cast<std::ptrdiff_t>(i);
                    in_rows.insert(in_rows.end(), x.begin() + at * hidden, x.begin() + (at + 1) * hidden);
                    w.insert(w.end(), weight.begin() + at * top_k, weight.begin() + (at + 1) * top_k);
                    ids.insert(ids.end(), expert.begin() + at * top_k, expert.begin() + (at + 1) * top_k);
                }
                const Device<float> dx(b, in_rows), dw(b, w);
                const Device<int32_t> de(b, ids), live = scalar(b, list.size());
                Device<float> y(b, std::vector<float>(in_rows.size(), 0.0f));
                b.experts({{static_cast<int>(list.size()), live.data()},
                           dx.data(),
                           set,
                           de.data(),
                           dw.data(),
                           top_k,
                           nullptr,
                           y.data()});
                return y.get();
            };
            std::vector<int> everyone;
            for (int i = 0; i < rows; ++i) everyone.push_back(i);
            const std::vector<float> all = run(everyone);
            for (const int i : {0, 1, 15, 16, 39, 40, 41, 63, 64})
                expect_same(run({i}).data(), all.data() + i * hidden, hidden,
                            format("%s, row %d of 65 alone", precision.c_str(), i));
            // 42 rows of 3 pairs: the most of which a block finds its own; 43: lists are made.
            for (const int n : {2, 17, 42, 43})
                expect_same(run({everyone.begin(), everyone.begin() + n}).data(), all.data(),
                            static_cast<size_t>(n * hidden),
                            format("%s, the first %d rows of 65", precision.c_str(), n));
            expect_same(run(everyone), all, "the same launch after others");
        }
}

}  // namespace kdt::testing
