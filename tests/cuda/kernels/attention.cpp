// Attention over committed pages and tree rows.
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

struct Shape {
    int heads, latent, rope;
};

std::vector<Shape> shapes() {
    if (options().small) return {{6, 72, 24}, {4, 64, 16}, {20, 512, 64}};
    return {{6, 72, 24}, {16, 512, 64}, {64, 512, 64}};
}

// A cache of random latents, one long sequence in shuffled pages, and scratch rows.
struct Scene {
    Backend& b;
    const Shape shape;
    const bool bf16;
    const int width, positions;
    std::vector<float> page_values, scratch_values;  // rounded, [slots, width]
    std::vector<int32_t> table;
    Device<uint8_t> pages, scratch;
    Device<int32_t> page_table;
    LatentCache cache;
    float scale;

    Scene(Backend& backend, Random& random, const Shape& s, int keys)
        : b(backend),
          shape(s),
          bf16(backend.cache_dtype() == DType::bf16),
          width(s.latent + s.rope),
          positions((keys + kPageSize - 1) / kPageSize * kPageSize),
          page_values(values(random, static_cast<size_t>(positions + 3 * kPageSize))),
          scratch_values(values(random, kMaxTreeRows)),
          pages(b, bytes(page_values)),
          scratch(b, bytes(scratch_values)),
          page_table(b, make_table(random)),
          cache{pages.data(), scratch.data(), page_table.data(), positions / kPageSize + 3,
                positions / kPageSize},
          scale(0.7f / std::sqrt(static_cast<float>(width)) * 4.0f) {}

    std::vector<float> values(Random& random, size_t rows) const {
        std::vector<float> v(rows * static_cast<size_t>(width));
        for (float& x : v) x = bf16 ? bf16_round(random.symmetric()) : random.symmetric();
        return v;
    }
    std::vector<uint8_t> bytes(const std::vector<float>& v) const { return cache_bytes(v, bf16); }
    std::vector<int32_t> make_table(Random& random) {
        const int n = positions / kPageSize;
        const std::vector<int> order = random.permutation(n + 3);
        table.assign(order.begin(), order.begin() + n);
        return table;
    }
    const float* key(int prefix, const std::vector<int32_t>& ancestors, int v) const {
        if (v >= prefix)
            return scratch_values.data() +
                   static_cast<size_t>(ancestors[static_cast<size_t>(v - prefix)] * width);
        const size_t slot = static_cast<size_t>(table[static_cast<size_t>(v / kPageSize)]) * kPageSize +
                            static_cast<size_t>(v % kPageSize);
        return page_values.data() + slot * static_cast<size_t>(width);
    }
};

struct Row {
    std::vector<float> q;
    int prefix;
    std::vector<int32_t> ancestors;
};

Row random_row(Random& random, const Scene& s, int prefix, int ancestors) {
    Row row;
    row.prefix = prefix;
    const std::vector<int> order = random.permutation(kMaxTreeRows);
    row.ancestors.assign(order.begin(), order.begin() + ancestors);
    row.q.resize(static_cast<size_t>(s.shape.heads * s.width));
    for (float& v : row.q) v = random.symmetric() * 2.0f;
    return row;
}

std::vector<std::vector<uint8_t>> attend(const Scene& s, const std::vector<const Row*>& rows, int capacity) {
    Backend& b = s.b;
    const size_t q_width = static_cast<size_t>(s.shape.heads * s.width), n = static_cast<size_t>(capacity);
    std::vector<float> q(n * q_width, NAN);
    std::vector<int32_t> sequence(n, 0), prefix(n, 1), count(n, 0), ancestors(n * kMaxAncestors, 0);
    for (size_t i = 0; i < rows.size(); ++i) {
        std::copy(rows[i]->q.begin(), rows[i]->q.end(), q.begin() + static_cast<ptrdiff_t>(i * q_width));
        prefix[i] = rows[i]->prefix;
        count[i] = static_cast<int32_t>(rows[i]->ancestors.size());
        std::copy(rows[i]->ancestors.begin(), rows[i]->ancestors.end(),
                  ancestors.begin() + static_cast<ptrdiff_t>(i * kMaxAncestors));
    }
    const Device<float> dq(b, q);
    const Device<int32_t> ds(b, sequence), dp(b, prefix), dc(b, count), da(b, ancestors);
    const Device<int32_t> live = scalar(b, rows.size());
    RowBatch batch;
    batch.sequence = ds.data();
    batch.prefix = dp.data();
    batch.ancestor_count = dc.data();
    batch.ancestors = da.data();
    const size_t out_width = static_cast<size_t>(s.shape.heads * s.shape.latent);
    Device<float> out(b, n * out_width);
    b.attend({{capacity, live.data()},
              batch,
              dq.data(),
              s.cache,
              s.shape.heads,
              s.shape.latent,
              s.shape.rope,
              s.scale,
              out.data()});
    return rows_of(out.get(), out_width, rows.size());
}

void compare_with_reference(const Scene& s, const Row& row, const std::string& what) {
    const int keys = row.prefix + static_cast<int>(row.ancestors.size());
    const std::vector<float> all = floats_of(attend(s, {&row}, 1)[0]);
    std::vector<float> got;
    std::vector<double> wanted, bound;
    const int step =
        keys > 2000 ? std::max(1, s.shape.heads / 4) : 1;  // the reference is slow: a few heads are enough
    for (int h = 0; h < s.shape.heads; h += step) {
        got.insert(got.end(), all.begin() + h * s.shape.latent, all.begin() + (h + 1) * s.shape.latent);
        const float* q = row.q.data() + h * s.width;
        std::vector<double> score(static_cast<size_t>(keys));
        double greatest = -1e300;
        for (int v = 0; v < keys; ++v) {
            const float* k = s.key(row.prefix, row.ancestors, v);
            double sum = 0.0;
            for (int c = 0; c < s.width; ++c)
                sum += static_cast<double>(s.bf16 ? bf16_round(q[c]) : q[c]) * static_cast<double>(k[c]);
            score[static_cast<size_t>(v)] = sum * static_cast<double>(s.scale);
            greatest = std::max(greatest, score[static_cast<size_t>(v)]);
        }
        std::vector<double> o(static_cast<size_t>(s.shape.latent), 0.0), size(o);
        double total = 0.0;
        for (int v = 0; v < keys; ++v) {
            const double p = std::exp(score[static_cast<size_t>(v)] - greatest);
            const float* k = s.key(row.prefix, row.ancestors, v);
            total += p;
            for (int c = 0; c < s.shape.latent; ++c) {
                o[static_cast<size_t>(c)] += p * static_cast<double>(k[c]);
                size[static_cast<size_t>(c)] += p * std::fabs(static_cast<double>(k[c]));
            }
        }
        for (size_t c = 0; c < o.size(); ++c) {
            wanted.push_back(o[c] / total);
            bound.push_back((s.bf16 ? 0x1p-8 : 4e-6) * size[c] / total + 1e-7);
        }
    }
    expect_near(got, wanted, bound, what);
}

std::vector<int> lengths(const Shape& s) {
    if (options().small)
        return s.latent == 512 ? std::vector<int>{1, 64, 130}
                               : std::vector<int>{1, 63, 64, 65, 128, 1023, 1025, 1300};
    return {1,    2,    63,   64,   65,   127,   128,   129,   1023, 1024,
            1025, 4095, 4096, 4097, 8193, 16383, 16384, 16385, 32769};
}

}  // namespace

// A key that is missed or counted twice at a step, page or split border; a wrong scale; a head too many.
KDT_CASE(attend_is_softmax_over_the_keys) {
    Random random(21);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Shape& shape : shapes()) {
            const std::vector<int> list = lengths(shape);
            const Scene s(b, random, shape, list.back() + 1);
            for (const int n : list) {
                if (precision == "f32" && n > 8200 && shape.heads > 16) continue;
                for (const int ancestors : {0, 1, 30, 65}) {
                    if (ancestors > n || (ancestors == 30 && n > 1300)) continue;
                    compare_with_reference(
                        s, random_row(random, s, n - ancestors, ancestors),
                        format("%s, %d heads of %d + %d, %d keys of which %d in scratch", precision.c_str(),
                               shape.heads, shape.latent, shape.rope, n, ancestors));
                }
            }
        }
    }
}

// Keys from a page and the same keys from scratch rows must give the same bits: commit must not change the
// past.
KDT_CASE(gathered_keys_equal_committed_keys) {
    Random random(22);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Shape& shape : shapes()) {
            Scene s(b, random, shape, 1408);
            const std::vector<int> list =
                options().small ? (shape.latent == 512 ? std::vector<int>{65, 140}
                                                       : std::vector<int>{1, 64, 65, 200, 1060})
                                : std::vector<int>{1,   2,   63,   64,   65,   127,  128,  129, 191,
                                                   193, 320, 1020, 1024, 1030, 1088, 1089, 1400};
            for (const int n : list) {
                Row committed = random_row(random, s, n, 0);
                const auto wanted = attend(s, {&committed}, 1)[0];
                for (const int ancestors : {1, 2, 17, 64, 65}) {
                    if (ancestors > n) continue;
                    Row tree = random_row(random, s, n - ancestors, ancestors);
                    tree.q = committed.q;
                    for (int i = 0; i < ancestors; ++i)  // the same latents, in scratch
                        std::copy_n(
                            s.key(n, {}, n - ancestors + i), s.width,
                            s.scratch_values.begin() +
                                static_cast<ptrdiff_t>(tree.ancestors[static_cast<size_t>(i)] * s.width));
                    s.scratch.set(s.bytes(s.scratch_values));
                    expect_same(attend(s, {&tree}, 1)[0], wanted,
                                format("%s, %d heads of %d, %d keys, %d of them in scratch",
                                       precision.c_str(), shape.heads, shape.latent, n, ancestors));
                }
            }
        }
    }
}

// A row that feels its neighbours, its place, or the way in which the row count cuts the work (a block has
// one split of the row, some, or all).
KDT_CASE(attend_rows_are_pure) {
    Random random(23);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Shape& shape : shapes()) {
            const bool brief = options().small && shape.latent == 512;
            const int longest = options().small ? (brief ? 200 : 1300) : 4500;
            const Scene s(b, random, shape, longest + kMaxAncestors);
            const int pool = options().small ? 3 : 8;
            std::vector<Row> rows;
            for (int i = 0; i < pool; ++i) {
                const int ancestors = random.below(3) == 0 ? 0 : random.between(1, kMaxAncestors);
                rows.push_back(
                    random_row(random, s, i == 0 ? longest : random.between(1, longest), ancestors));
            }
            check_purity(format("%s, %d heads of %d", precision.c_str(), shape.heads, shape.latent), random,
                         pool, [&](const std::vector<int>& list, int capacity) {
                             std::vector<Row> extra;
                             extra.reserve(list.size());
                             std::vector<const Row*> all;
                             for (const int i : list) {
                                 if (i >= 0) {
                                     all.push_back(&rows[static_cast<size_t>(i)]);
                                     continue;
                                 }
                                 Row bad =
                                     random_row(random, s, random.between(1, longest), random.below(60));
                                 for (float& v : bad.q) v = garbage(-1 - i, random);
                                 extra.push_back(bad);
                                 all.push_back(&extra.back());
                             }
                             return attend(s, all, capacity);
                         });
        }
    }
}

}  // namespace kdt::testing
