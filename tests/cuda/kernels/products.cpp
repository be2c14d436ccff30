// Matrix products: dense, gated, per head.
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

struct Shape {
    WeightKind kind;
    DType scales;
    int out, in;
};

std::vector<Shape> shapes() {
    const auto f = WeightKind::f32, b = WeightKind::bf16, w = WeightKind::w4a16;
    std::vector<Shape> list = {
        {f, DType::f32, 40, 72},    {b, DType::f32, 33, 37},   {w, DType::f32, 50, 96},
        {w, DType::bf16, 96, 32},   {f, DType::f32, 24, 1024}, {b, DType::bf16, 100, 2048},
        {w, DType::bf16, 40, 2080}, {w, DType::f32, 16, 2048},
    };
    if (!options().small) {
        for (const Shape& s : std::vector<Shape>{{w, DType::bf16, 4096, 7168},
                                                 {b, DType::bf16, 576, 7168},
                                                 {b, DType::bf16, 1536, 7168},
                                                 {f, DType::f32, 384, 7168},
                                                 {w, DType::f32, 2048, 1408},
                                                 {b, DType::bf16, 12288, 1536}})
            list.push_back(s);
    }
    return list;
}

std::string label(const std::string& precision, const Shape& s) {
    const char* kind = s.kind == WeightKind::f32    ? "f32"
                       : s.kind == WeightKind::bf16 ? "bf16"
                       : s.scales == DType::f32     ? "w4/f32"
                                                    : "w4/bf16";
    return format("%s, %s [%d, %d]", precision.c_str(), kind, s.out, s.in);
}

// What the op's operands round to.
double operand(float x, bool bf16) {
    return static_cast<double>(bf16 ? bf16_round(x) : x);
}

struct Product {
    double value, size;  // the sum, and the sum of magnitudes
};

Product dot(const float* x, const float* w, int n, bool bf16) {
    Product p{0.0, 0.0};
    for (int k = 0; k < n; ++k) {
        const double term = operand(x[k], bf16) * operand(w[k], bf16);
        p.value += term;
        p.size += std::fabs(term);
    }
    return p;
}

// A W4A16 weight is exact before its scale, which is applied to float32 sums: the weight itself is not
// rounded to bf16.
Product dot(const float* x, const TestMatrix& m, int row, bool bf16) {
    const float* w = m.value.data() + static_cast<size_t>(row) * static_cast<size_t>(m.in);
    if (m.kind != WeightKind::w4a16) return dot(x, w, m.in, bf16);
    Product p{0.0, 0.0};
    for (int k = 0; k < m.in; ++k) {
        const double term = operand(x[k], bf16) * static_cast<double>(w[k]);
        p.value += term;
        p.size += std::fabs(term);
    }
    return p;
}

constexpr double kSumError = 4e-6;  // of the sum of magnitudes

std::vector<float> random_rows(Random& random, int rows, int width, bool integers = false) {
    std::vector<float> x(static_cast<size_t>(rows) * static_cast<size_t>(width));
    for (float& v : x) v = integers ? static_cast<float>(random.between(-8, 8)) : random.symmetric();
    return x;
}

// Rows of a pool or of garbage, one after another, NaN past the live ones.
std::vector<float> gather(const std::vector<float>& pool, const std::vector<int>& rows, int capacity,
                          int width, Random& random) {
    std::vector<float> x(static_cast<size_t>(capacity) * static_cast<size_t>(width), NAN);
    for (size_t i = 0; i < rows.size(); ++i)
        for (int k = 0; k < width; ++k)
            x[i * static_cast<size_t>(width) + static_cast<size_t>(k)] =
                rows[i] < 0 ? garbage(-1 - rows[i], random)
                            : pool[static_cast<size_t>(rows[i]) * static_cast<size_t>(width) +
                                   static_cast<size_t>(k)];
    return x;
}

void linear_against_reference(bool integers) {
    Random random(1);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Shape& s : shapes()) {
            const TestMatrix m = random_matrix(random, s.kind, s.scales, s.out, s.in, integers);
            const Weight w = b.upload_matrix(m.host(), "w");
            const int rows = options().small ? 5 : 11;
            const std::vector<float> x = random_rows(random, rows, s.in, integers);
            const std::vector<float> before = random_rows(random, rows, s.out, integers);
            const Device<float> dx(b, x);
            const Device<int32_t> live = scalar(b, static_cast<size_t>(rows));
            for (const bool accumulate : {false, true}) {
                Device<float> y(b, before);
                b.linear({{rows, live.data()}, dx.data(), w, y.data(), accumulate});
                std::vector<double> wanted, bound;
                for (int i = 0; i < rows; ++i)
                    for (int n = 0; n < s.out; ++n) {
                        const Product p = dot(x.data() + static_cast<size_t>(i) * static_cast<size_t>(s.in),
                                              m, n, precision == "bf16");
                        const double old = accumulate ? static_cast<double>(before[wanted.size()]) : 0.0;
                        wanted.push_back(old + p.value);
                        bound.push_back(integers ? 0.0 : kSumError * p.size + 1e-7 * std::fabs(old) + 1e-30);
                    }
                expect_near(y.get(), wanted, bound, label(precision, s) + (accumulate ? ", added" : ""));
            }
        }
    }
}

}  // namespace

// A wrong element order in the layout, a wrong K border, a lost or doubled product.
KDT_CASE(linear_is_the_product) {
    linear_against_reference(false);
}

// Rounding that should not be there: with whole numbers every order of summation gives the exact product.
KDT_CASE(linear_of_integers_is_exact) {
    linear_against_reference(true);
}

// A row that feels its neighbours, its place, padding or the row count.
KDT_CASE(linear_rows_are_pure) {
    Random random(2);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Shape& s : shapes()) {
            const TestMatrix m = random_matrix(random, s.kind, s.scales, s.out, s.in);
            const Weight w = b.upload_matrix(m.host(), "w");
            const int pool_rows = options().small ? 3 : 9;
            const std::vector<float> pool = random_rows(random, pool_rows, s.in);
            const std::vector<float> before = random_rows(random, pool_rows, s.out);
            for (const bool accumulate : {false, true}) {
                if (accumulate && options().small) continue;
                check_purity(
                    label(precision, s), random, pool_rows, [&](const std::vector<int>& rows, int capacity) {
                        const Device<float> x(b, gather(pool, rows, capacity, s.in, random));
                        const Device<int32_t> live = scalar(b, rows.size());
                        Device<float> y(b, static_cast<size_t>(capacity) * static_cast<size_t>(s.out));
                        if (accumulate) {
                            std::vector<float> start =
                                gather(before, rows, static_cast<int>(rows.size()), s.out, random);
                            y.set(start);
                        }
                        b.linear({{capacity, live.data()}, x.data(), w, y.data(), accumulate});
                        return rows_of(y.get(), static_cast<size_t>(s.out), rows.size());
                    });
            }
        }
    }
}

// The bits of an INT4 product in f32 precision are those of the float32 product with the dequantised matrix.
KDT_CASE(int4_equals_dequantised) {
    Random random(3);
    Backend& b = backend("f32");
    for (const DType scales : {DType::f32, DType::bf16}) {
        const int out = 45, in = 352, rows = 9;
        const TestMatrix m = random_matrix(random, WeightKind::w4a16, scales, out, in);
        TestMatrix plain = m;
        plain.kind = WeightKind::f32;
        plain.f32 = m.value;
        const Weight w4 = b.upload_matrix(m.host(), "w4"), w32 = b.upload_matrix(plain.host(), "w32");
        const Device<float> x(b, random_rows(random, rows, in));
        const Device<int32_t> live = scalar(b, static_cast<size_t>(rows));
        Device<float> a(b, static_cast<size_t>(rows) * out), c(b, static_cast<size_t>(rows) * out);
        b.linear({{rows, live.data()}, x.data(), w4, a.data(), false});
        b.linear({{rows, live.data()}, x.data(), w32, c.data(), false});
        expect_same(a.get(), c.get(), "w4a16 against dequantised");
    }
}

namespace {

struct GatedShape {
    WeightKind gate, up;
    int out, in;
};

std::vector<GatedShape> gated_shapes() {
    const auto f = WeightKind::f32, b = WeightKind::bf16, w = WeightKind::w4a16;
    std::vector<GatedShape> list = {
        {f, f, 40, 72}, {b, b, 20, 600}, {w, w, 72, 96}, {w, b, 48, 64}, {w, w, 33, 1024}};
    if (!options().small)
        for (const GatedShape& s :
             std::vector<GatedShape>{{w, w, 2048, 7168}, {b, b, 2816, 2048}, {b, f, 300, 2048}})
            list.push_back(s);
    return list;
}

}  // namespace

// Gate and up exchanged, a wrong silu, halves of a row tile mixed up, the two-pass form for mixed types.
KDT_CASE(gated_linear_is_silu_of_gate_times_up) {
    Random random(4);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const GatedShape& s : gated_shapes()) {
            const TestMatrix gate = random_matrix(random, s.gate, DType::bf16, s.out, s.in);
            const TestMatrix up = random_matrix(random, s.up, DType::bf16, s.out, s.in);
            const Weight g = b.upload_matrix(gate.host(), "gate"), u = b.upload_matrix(up.host(), "up");
            const int rows = 5;
            const std::vector<float> x = random_rows(random, rows, s.in);
            const Device<float> dx(b, x);
            const Device<int32_t> live = scalar(b, static_cast<size_t>(rows));
            Device<float> y(b, static_cast<size_t>(rows) * static_cast<size_t>(s.out));
            b.gated_linear({{rows, live.data()}, dx.data(), g, u, y.data()});
            std::vector<double> wanted, bound;
            for (int i = 0; i < rows; ++i)
                for (int n = 0; n < s.out; ++n) {
                    const float* row = x.data() + static_cast<size_t>(i) * static_cast<size_t>(s.in);
                    const Product pg = dot(row, gate, n, precision == "bf16"),
                                  pu = dot(row, up, n, precision == "bf16");
                    const double silu = pg.value / (1.0 + std::exp(-pg.value));
                    wanted.push_back(silu * pu.value);
                    bound.push_back(1.1 * std::fabs(pu.value) * kSumError * pg.size +
                                    std::fabs(silu) * kSumError * pu.size +
                                    2e-6 * std::fabs(silu * pu.value) + 1e-12);
                }
            expect_near(y.get(), wanted, bound, format("%s gated [%d, %d]", precision.c_str(), s.out, s.in));
        }
    }
}

KDT_CASE(gated_linear_rows_are_pure) {
    Random random(5);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const GatedShape& s : gated_shapes()) {
            const TestMatrix gate = random_matrix(random, s.gate, DType::bf16, s.out, s.in);
            const TestMatrix up = random_matrix(random, s.up, DType::bf16, s.out, s.in);
            const Weight g = b.upload_matrix(gate.host(), "gate"), u = b.upload_matrix(up.host(), "up");
            const int pool_rows = options().small ? 2 : 7;
            const std::vector<float> pool = random_rows(random, pool_rows, s.in);
            check_purity(format("%s gated [%d, %d]", precision.c_str(), s.out, s.in), random, pool_rows,
                         [&](const std::vector<int>& rows, int capacity) {
                             const Device<float> x(b, gather(pool, rows, capacity, s.in, random));
                             const Device<int32_t> live = scalar(b, rows.size());
                             Device<float> y(b, static_cast<size_t>(capacity) * static_cast<size_t>(s.out));
                             b.gated_linear({{capacity, live.data()}, x.data(), g, u, y.data()});
                             return rows_of(y.get(), static_cast<size_t>(s.out), rows.size());
                         });
        }
    }
}

namespace {

struct HeadShape {
    int heads, nope, rope, latent, v;
    bool interleaved;
};

std::vector<HeadShape> head_shapes() {
    std::vector<HeadShape> list = {{3, 40, 24, 72, 48, true}, {4, 32, 16, 64, 20, false}};
    if (!options().small) list.push_back({64, 128, 64, 512, 128, true});
    return list;
}

struct Heads {
    TestMatrix key_up, value_up;
    std::vector<float> cos, sin;
    int positions = 50;

    Heads(Random& random, const HeadShape& s, WeightKind kind)
        : key_up(random_matrix(random, kind, DType::bf16, s.heads * s.latent, s.nope)),
          value_up(random_matrix(random, kind, DType::bf16, s.heads * s.v, s.latent)) {
        for (int p = 0; p < positions; ++p)
            for (int j = 0; j < s.rope / 2; ++j) {
                cos.push_back(static_cast<float>(std::cos(p * std::pow(0.3, j))));
                sin.push_back(static_cast<float>(std::sin(p * std::pow(0.3, j))));
            }
    }
};

}  // namespace

// Heads whose rows straddle a row tile, a head that reads its neighbour's query, RoPE in the wrong pairs.
KDT_CASE(absorb_query_and_project_value) {
    Random random(6);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        const bool bf16 = precision == "bf16";
        for (const HeadShape& s : head_shapes())
            for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16}) {
                const Heads h(random, s, kind);
                const Weight key_up = b.upload_matrix(h.key_up.host(), "key_up");
                const Weight value_up = b.upload_matrix(h.value_up.host(), "value_up");
                const Device<float> cos(b, h.cos), sin(b, h.sin);
                const RopeTable table{cos.data(), sin.data(), s.rope, h.positions, s.interleaved};
                const int q_width = s.nope + s.rope, width = s.latent + s.rope,
                          pool_rows = options().small ? 2 : 5;
                const std::vector<float> q = random_rows(random, pool_rows, s.heads * q_width);
                const std::vector<float> o = random_rows(random, pool_rows, s.heads * s.latent);
                std::vector<int32_t> position;
                for (int i = 0; i < pool_rows; ++i) position.push_back(random.below(h.positions));

                const auto absorb = [&](const std::vector<int>& rows, int capacity) {
                    const Device<float> x(b, gather(q, rows, capacity, s.heads * q_width, random));
                    const Device<int32_t> live = scalar(b, rows.size());
                    std::vector<int32_t> at(static_cast<size_t>(capacity), 0);
                    for (size_t i = 0; i < rows.size(); ++i)
                        at[i] = rows[i] < 0 ? 3 : position[static_cast<size_t>(rows[i])];
                    const Device<int32_t> positions(b, at);
                    RowBatch batch;
                    batch.position = positions.data();
                    Device<float> y(b, static_cast<size_t>(capacity) * static_cast<size_t>(s.heads * width));
                    b.absorb_query({{capacity, live.data()},
                                    batch,
                                    x.data(),
                                    key_up,
                                    s.heads,
                                    s.nope,
                                    s.latent,
                                    table,
                                    y.data()});
                    return rows_of(y.get(), static_cast<size_t>(s.heads * width), rows.size());
                };
                const auto project = [&](const std::vector<int>& rows, int capacity) {
                    const Device<float> x(b, gather(o, rows, capacity, s.heads * s.latent, random));
                    const Device<int32_t> live = scalar(b, rows.size());
                    Device<float> y(b, static_cast<size_t>(capacity) * static_cast<size_t>(s.heads * s.v));
                    b.project_value(
                        {{capacity, live.data()}, x.data(), value_up, s.heads, s.latent, s.v, y.data()});
                    return rows_of(y.get(), static_cast<size_t>(s.heads * s.v), rows.size());
                };
                const std::string what =
                    format("%s, %d heads of %d + %d", precision.c_str(), s.heads, s.latent, s.rope);

                std::vector<float> got = floats_of(absorb({1}, 1)[0]);
                std::vector<double> wanted, bound;
                for (int head = 0; head < s.heads; ++head) {
                    const float* x = q.data() + (static_cast<size_t>(s.heads) + static_cast<size_t>(head)) *
                                                    static_cast<size_t>(q_width);
                    for (int c = 0; c < s.latent; ++c) {
                        const Product p = dot(x, h.key_up, head * s.latent + c, bf16);
                        wanted.push_back(p.value);
                        bound.push_back(kSumError * p.size + 1e-30);
                    }
                    const size_t at = static_cast<size_t>(position[1]) * static_cast<size_t>(s.rope / 2);
                    std::vector<double> turned(static_cast<size_t>(s.rope));
                    for (int j = 0; j < s.rope / 2; ++j) {
                        const int first = s.interleaved ? 2 * j : j,
                                  second = s.interleaved ? 2 * j + 1 : j + s.rope / 2;
                        const double x0 = static_cast<double>(x[s.nope + first]),
                                     x1 = static_cast<double>(x[s.nope + second]);
                        const double co = static_cast<double>(h.cos[at + static_cast<size_t>(j)]);
                        const double si = static_cast<double>(h.sin[at + static_cast<size_t>(j)]);
                        turned[static_cast<size_t>(first)] = x0 * co - x1 * si;
                        turned[static_cast<size_t>(second)] = x1 * co + x0 * si;
                    }
                    for (const double t : turned) {
                        wanted.push_back(t);
                        bound.push_back(2e-7);
                    }
                }
                expect_near(got, wanted, bound, what + ", absorbed");

                got = floats_of(project({0}, 1)[0]);
                wanted.clear();
                bound.clear();
                for (int head = 0; head < s.heads; ++head)
                    for (int j = 0; j < s.v; ++j) {
                        const Product p = dot(o.data() + static_cast<size_t>(head * s.latent), h.value_up,
                                              head * s.v + j, bf16);
                        wanted.push_back(p.value);
                        bound.push_back(kSumError * p.size + 1e-30);
                    }
                expect_near(got, wanted, bound, what + ", projected");

                if (options().small && kind == WeightKind::f32) continue;
                check_purity(what + ", absorbed", random, pool_rows, absorb);
                check_purity(what + ", projected", random, pool_rows, project);
            }
    }
}

}  // namespace kdt::testing
