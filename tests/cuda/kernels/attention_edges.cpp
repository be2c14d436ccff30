// Attention where a reference in float64 is too soft: results that are exact, or that must not change by a
// bit.
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

struct Shape {
    int heads, latent, rope;
    int width() const { return latent + rope; }
};

std::vector<Shape> shapes() {
    if (options().small) return {{4, 64, 16}};
    return {{4, 64, 16}, {16, 512, 64}, {64, 512, 64}};
}

const std::vector<int> kLengths = {1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025};

// Sequences of kPages pages each, in shuffled places, and scratch rows; all NaN until written.
struct Cache {
    static constexpr int kPages = 18, kSequences = 3, kPlaces = kPages * kSequences + 2;
    Backend& b;
    const Shape shape;
    const size_t element;
    std::vector<uint8_t> page_bytes, scratch_bytes;
    std::vector<int32_t> table;

    Cache(Backend& backend, Random& random, const Shape& s)
        : b(backend),
          shape(s),
          element(backend.cache_dtype() == DType::bf16 ? 2 : 4),
          page_bytes(static_cast<size_t>(kPlaces * kPageSize * s.width()) * element, 0xFF),
          scratch_bytes(static_cast<size_t>(kMaxTreeRows * s.width()) * element, 0xFF) {
        const std::vector<int> order = random.permutation(kPlaces);
        table.assign(order.begin(), order.begin() + kPages * kSequences);
    }
    void put(std::vector<uint8_t>& bytes, size_t slot, const std::vector<float>& latent) const {
        for (size_t c = 0; c < latent.size(); ++c) {
            const uint16_t half = bf16_bits(latent[c]);
            const void* from = element == 2 ? static_cast<const void*>(&half) : &latent[c];
            std::memcpy(bytes.data() + (slot * latent.size() + c) * element, from, element);
        }
    }
    void put_page(int sequence, int position, const std::vector<float>& latent) {
        const int page = table[static_cast<size_t>(sequence * kPages + position / kPageSize)];
        put(page_bytes, static_cast<size_t>(page * kPageSize + position % kPageSize), latent);
    }
    void put_scratch(int row, const std::vector<float>& latent) {
        put(scratch_bytes, static_cast<size_t>(row), latent);
    }
    std::vector<float> random_latent(Random& random) const {
        std::vector<float> v(static_cast<size_t>(shape.width()));
        for (float& x : v) x = bf16_round(random.symmetric());  // the same value in either cache
        return v;
    }
};

struct Row {
    int sequence, prefix;
    std::vector<int32_t> ancestors;
    std::vector<float> q;
};

std::vector<float> random_query(Random& random, const Shape& s) {
    std::vector<float> q(static_cast<size_t>(s.heads * s.width()));
    for (float& v : q) v = 2.0f * random.symmetric();
    return q;
}

// [rows][heads, latent]
std::vector<std::vector<float>> attend(const Cache& c, const std::vector<Row>& rows, float scale) {
    Backend& b = c.b;
    const size_t n = rows.size(), out_width = static_cast<size_t>(c.shape.heads * c.shape.latent);
    std::vector<float> q;
    std::vector<int32_t> sequence, prefix, count, ancestors(n * kMaxAncestors, 0);
    for (size_t i = 0; i < n; ++i) {
        q.insert(q.end(), rows[i].q.begin(), rows[i].q.end());
        sequence.push_back(rows[i].sequence);
        prefix.push_back(rows[i].prefix);
        count.push_back(static_cast<int32_t>(rows[i].ancestors.size()));
        std::copy(rows[i].ancestors.begin(), rows[i].ancestors.end(),
                  ancestors.begin() + static_cast<std::ptrdiff_t>(i * kMaxAncestors));
    }
    const Device<float> dq(b, q);
    const Device<int32_t> ds(b, sequence), dp(b, prefix), dc(b, count), da(b, ancestors), dt(b, c.table);
    const Device<int32_t> live = scalar(b, n);
    Device<uint8_t> pages(b, c.page_bytes), scratch(b, c.scratch_bytes);
    RowBatch batch;
    batch.sequence = ds.data();
    batch.prefix = dp.data();
    batch.ancestor_count = dc.data();
    batch.ancestors = da.data();
    Device<float> out(b, n * out_width);
    b.attend({{static_cast<int>(n), live.data()},
              batch,
              dq.data(),
              {pages.data(), scratch.data(), dt.data(), Cache::kPlaces, Cache::kPages},
              c.shape.heads,
              c.shape.latent,
              c.shape.rope,
              scale,
              out.data()});
    const std::vector<float> all = out.get();
    std::vector<std::vector<float>> result;
    for (size_t i = 0; i < n; ++i)
        result.emplace_back(all.begin() + static_cast<std::ptrdiff_t>(i * out_width),
                            all.begin() + static_cast<std::ptrdiff_t>((i + 1) * out_width));
    return result;
}

std::vector<int32_t> some_rows(Random& random, int n) {
    std::vector<int> order = random.permutation(kMaxTreeRows);
    return {order.begin(), order.begin() + n};
}

}  // namespace

// A slot behind the prefix, another page or a scratch row that is no ancestor reaches the sums: 0 * NaN is
// NaN.
KDT_CASE(attend_is_deaf_to_slots_that_are_not_named) {
    Random random(81);
    for (const std::string precision : {"bf16", "f32"})
        for (const Shape& s : shapes())
            for (const int keys : kLengths)
                for (const int ancestors : {0, 1, 65}) {
                    if (ancestors > keys) continue;
                    Cache poisoned(backend(precision), random, s);
                    Cache clean = poisoned;
                    for (size_t slot = 0; slot < static_cast<size_t>(Cache::kPlaces * kPageSize); ++slot)
                        clean.put(clean.page_bytes, slot, clean.random_latent(random));
                    for (int r = 0; r < kMaxTreeRows; ++r) clean.put_scratch(r, clean.random_latent(random));
                    const Row row{1, keys - ancestors, some_rows(random, ancestors), random_query(random, s)};
                    for (int p = 0; p < row.prefix; ++p) {
                        const std::vector<float> latent = clean.random_latent(random);
                        clean.put_page(1, p, latent);
                        poisoned.put_page(1, p, latent);
                    }
                    for (const int32_t r : row.ancestors) {
                        const std::vector<float> latent = clean.random_latent(random);
                        clean.put_scratch(r, latent);
                        poisoned.put_scratch(r, latent);
                    }
                    expect_same(
                        attend(poisoned, {row}, 0.1f)[0], attend(clean, {row}, 0.1f)[0],
                        format("%s, %d keys of which %d in scratch", precision.c_str(), keys, ancestors));
                }
}

// A row that reads the pages of another sequence of the same batch, or of the first one.
KDT_CASE(attend_reads_each_rows_own_sequence) {
    Random random(82);
    for (const std::string precision : {"bf16", "f32"})
        for (const Shape& s : shapes()) {
            Cache c(backend(precision), random, s);
            for (int sequence = 0; sequence < Cache::kSequences; ++sequence)
                for (int p = 0; p < 300; ++p) c.put_page(sequence, p, c.random_latent(random));
            for (int r = 0; r < kMaxTreeRows; ++r) c.put_scratch(r, c.random_latent(random));
            const std::vector<float> q = random_query(random, s);  // of every row: only the keys differ
            std::vector<Row> rows;
            for (int i = 0; i < 9; ++i)
                rows.push_back({i % 3, i < 6 ? 200 : 64 + i, some_rows(random, i % 4), q});
            const auto together = attend(c, rows, 0.1f);
            for (size_t i = 0; i < rows.size(); ++i)
                expect_same(attend(c, {rows[i]}, 0.1f)[0], together[i], format("row %zu alone", i));
            for (const size_t i : {size_t{1}, size_t{2}})
                if (together[i] == together[0]) failed("sequences %zu and 0 gave row 0's output", i);
            // the same keys under another sequence's number
            Cache renamed = c;
            for (int page = 0; page < Cache::kPages; ++page)
                std::swap(renamed.table[static_cast<size_t>(page)],
                          renamed.table[static_cast<size_t>(2 * Cache::kPages + page)]);
            Row row = rows[2];
            row.sequence = 0;
            expect_same(attend(renamed, {row}, 0.1f)[0], together[2], "sequence 2 as sequence 0");
        }
}

// A key that counts in the sum of weights and not in that of values, or the other way round, at any border:
// keys that are all alike give their value exactly.
KDT_CASE(attend_over_equal_keys_gives_their_value) {
    Random random(83);
    for (const std::string precision : {"bf16", "f32"})
        for (const Shape& s : shapes())
            for (const int keys : kLengths)
                for (const int ancestors : {0, 1, 65}) {
                    if (ancestors > keys) continue;
                    Cache c(backend(precision), random, s);
                    std::vector<float> key(static_cast<size_t>(s.width()));
                    for (float& x : key) x = 0.25f * static_cast<float>(random.between(-8, 8));
                    const Row row{0, keys - ancestors, some_rows(random, ancestors), random_query(random, s)};
                    for (int p = 0; p < row.prefix; ++p) c.put_page(0, p, key);
                    for (const int32_t r : row.ancestors) c.put_scratch(r, key);
                    std::vector<float> wanted;
                    for (int h = 0; h < s.heads; ++h)
                        wanted.insert(wanted.end(), key.begin(), key.begin() + s.latent);
                    for (float& x : wanted) x += 0.0f;  // -0 is not asked for
                    std::vector<float> got = attend(c, {row}, 0.3f)[0];
                    for (float& x : got) x += 0.0f;
                    expect_same(
                        got, wanted,
                        format("%s, %d keys of which %d in scratch", precision.c_str(), keys, ancestors));
                }
}

// A maximum that is not carried to the next chunk, split or group, or comes too late: one key so much louder
// than the others that it alone counts, wherever it stands; and scores beyond what exp can hold.
KDT_CASE(attend_hears_one_loud_key_wherever_it_stands) {
    Random random(84);
    for (const std::string precision : {"bf16", "f32"})
        for (const Shape& s : shapes()) {
            const int keys = 1090, ancestors = 30;
            for (const int loud : {0, 1, 63, 64, 127, 128, 129, 500, 1023, 1024, 1059, 1060, 1089}) {
                Cache c(backend(precision), random, s);
                const Row row{2, keys - ancestors, some_rows(random, ancestors),
                              std::vector<float>(static_cast<size_t>(s.heads * s.width()), 64.0f)};
                std::vector<float> wanted;
                for (int v = 0; v < keys; ++v) {
                    std::vector<float> latent = c.random_latent(random);
                    for (float& x : latent) x = v == loud ? std::fabs(x) + 1.0f : -std::fabs(x);
                    for (float& x : latent) x = bf16_round(x);
                    if (v < row.prefix)
                        c.put_page(2, v, latent);
                    else
                        c.put_scratch(row.ancestors[static_cast<size_t>(v - row.prefix)], latent);
                    if (v == loud)
                        for (int h = 0; h < s.heads; ++h)
                            wanted.insert(wanted.end(), latent.begin(), latent.begin() + s.latent);
                }
                expect_same(attend(c, {row}, 1.0f)[0], wanted,
                            format("%s, the key at %d of %d", precision.c_str(), loud, keys));
            }
        }
}

// A commit that rounds again, or to another slot: tree rows read their ancestors from scratch, and after the
// op `commit` the same keys from the pages.
KDT_CASE(attend_after_a_commit_reads_what_it_read_before) {
    Random random(85);
    for (const std::string precision : {"bf16", "f32"})
        for (const Shape& s : shapes())
            for (const int prefix : {1, 60, 64, 127, 1020}) {
                Cache c(backend(precision), random, s);
                const int length = 9;
                for (int p = 0; p < prefix; ++p) c.put_page(1, p, c.random_latent(random));
                for (int r = 0; r < kMaxTreeRows; ++r) c.put_scratch(r, c.random_latent(random));
                Row row{1, prefix, some_rows(random, length), random_query(random, s)};
                const auto before = attend(c, {row}, 0.1f)[0];

                Backend& b = c.b;
                Device<uint8_t> pages(b, c.page_bytes);
                const Device<uint8_t> scratch(b, c.scratch_bytes);
                std::vector<int32_t> path(row.ancestors);
                path.resize(kMaxTreeRows, -1);
                const Device<int32_t> dp(b, path), dt(b, c.table),
                    dl = scalar(b, length), start = scalar(b, static_cast<size_t>(prefix)),
                    sequence = scalar(b, 1);
                b.commit({dl.data(),
                          dp.data(),
                          start.data(),
                          sequence.data(),
                          s.width(),
                          {pages.data(), scratch.data(), dt.data(), Cache::kPlaces, Cache::kPages},
                          1,
                          0,
                          0});
                c.page_bytes = pages.get();
                std::fill(c.scratch_bytes.begin(), c.scratch_bytes.end(), uint8_t{0xFF});
                row.prefix += length;
                row.ancestors.clear();
                expect_same(attend(c, {row}, 0.1f)[0], before,
                            format("%s, committed at %d", precision.c_str(), prefix));
            }
}

}  // namespace kdt::testing
