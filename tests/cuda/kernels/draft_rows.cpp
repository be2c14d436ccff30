// The draft model's row ops against their formulas: kept taps, queries, entries of the key/value cache.
#include <algorithm>
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

// Angles that are no angles: a wrong one cannot cancel.
struct Angles {
    std::vector<float> cos, sin;
    Device<float> dc, ds;
    RopeTable table;
    Angles(Backend& b, Random& random, int dim, int positions, bool interleaved = false)
        : cos(random_values(random, static_cast<size_t>(positions * dim / 2))),
          sin(random_values(random, static_cast<size_t>(positions * dim / 2))),
          dc(b, cos),
          ds(b, sin),
          table{dc.data(), ds.data(), dim, positions, interleaved} {}

    // rope(rms_norm(x)) of one head, in float64.
    std::vector<double> apply(const float* x, const std::vector<float>& weight, float eps,
                              int position) const {
        const int dim = table.rope, half = dim / 2;
        double sum = 0.0;
        for (int c = 0; c < dim; ++c) sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
        const double r = 1.0 / std::sqrt(sum / dim + static_cast<double>(eps));
        std::vector<double> y(static_cast<size_t>(dim));
        for (int j = 0; j < half; ++j) {
            const int p0 = table.interleaved ? 2 * j : j, p1 = table.interleaved ? 2 * j + 1 : j + half;
            const size_t i0 = static_cast<size_t>(p0), i1 = static_cast<size_t>(p1);
            const size_t at = static_cast<size_t>(position * half + j);
            const double x0 = static_cast<double>(x[p0]) * r * static_cast<double>(weight[i0]);
            const double x1 = static_cast<double>(x[p1]) * r * static_cast<double>(weight[i1]);
            const double c = static_cast<double>(cos[at]), s = static_cast<double>(sin[at]);
            y[i0] = x0 * c - x1 * s;
            y[i1] = x1 * c + x0 * s;
        }
        return y;
    }
};

}  // namespace

// Taps in another row or order, more of them than asked for, a write past the room that they have.
KDT_CASE(keep_taps_copies_the_path) {
    Random random(41);
    for (const int width : {37, 72, 1028, 4500}) {
        Backend& b = backend("bf16");
        const int capacity = 40;
        const std::vector<float> taps = random_values(random, static_cast<size_t>(kMaxTreeRows * width));
        const Device<float> dt(b, taps);
        for (const int length : {0, 1, 5, 33}) {
            const int first = random.between(0, capacity - length);
            std::vector<int32_t> path(kMaxTreeRows, 3);
            const std::vector<int> order = random.permutation(kMaxTreeRows);
            std::copy_n(order.begin(), length, path.begin());
            const Device<int32_t> dp(b, path), dl = scalar(b, static_cast<size_t>(length)),
                                               df = scalar(b, static_cast<size_t>(first));
            Device<float> kept(b, std::vector<float>(static_cast<size_t>(capacity * width), -7.0f));
            b.keep_taps({dl.data(), dp.data(), df.data(), capacity, width, dt.data(), kept.data()});
            std::vector<float> wanted(static_cast<size_t>(capacity * width), -7.0f);
            for (int j = 0; j < length; ++j)
                std::copy_n(taps.begin() + path[static_cast<size_t>(j)] * width, width,
                            wanted.begin() + (first + j) * width);
            expect_same(kept.get(), wanted, format("%d taps of width %d at %d", length, width, first));
        }
        // no room: nothing is written past the end
        const Device<int32_t> dp(b, std::vector<int32_t>(kMaxTreeRows, 0)), dl = scalar(b, 3),
                                                                            df = scalar(b, capacity - 1);
        Device<float> kept(b, std::vector<float>(static_cast<size_t>((capacity + 4) * width), -7.0f));
        b.keep_taps({dl.data(), dp.data(), df.data(), capacity, width, dt.data(), kept.data()});
        const std::vector<float> got = kept.get();
        expect_same(std::vector<float>(got.begin() + capacity * width, got.end()),
                    std::vector<float>(static_cast<size_t>(4 * width), -7.0f), "behind the room");
    }
}

// A norm over the wrong head, pairs of the other convention, the angle of another position, in place.
KDT_CASE(norm_rotate) {
    Random random(42);
    Backend& b = backend("bf16");
    struct Shape {
        int heads, dim;
        bool interleaved;
    };
    for (const Shape s :
         {Shape{4, 16, false}, Shape{17, 10, false}, Shape{9, 128, false}, Shape{2, 130, true}}) {
        const int positions = 50, pool = 4, width = s.heads * s.dim;
        const Angles angles(b, random, s.dim, positions, s.interleaved);
        const std::vector<float> weight = random_values(random, static_cast<size_t>(s.dim));
        const float* w = b.upload_vector(weight, "norm");
        const std::vector<float> x = random_values(random, static_cast<size_t>(pool * width));
        std::vector<int> position;
        for (int i = 0; i < pool; ++i) position.push_back(i == 0 ? positions - 1 : random.below(positions));
        const auto run = [&](const std::vector<int>& rows, int capacity, bool in_place) {
            std::vector<float> in(static_cast<size_t>(capacity * width), NAN);
            std::vector<int32_t> at(static_cast<size_t>(capacity), 0);
            for (size_t i = 0; i < rows.size(); ++i) {
                at[i] = rows[i] < 0 ? 3 : position[static_cast<size_t>(rows[i])];
                for (int c = 0; c < width; ++c)
                    in[i * static_cast<size_t>(width) + static_cast<size_t>(c)] =
                        rows[i] < 0 ? garbage(-1 - rows[i], random)
                                    : x[static_cast<size_t>(rows[i] * width + c)];
            }
            const Device<float> dx(b, in);
            const Device<int32_t> dp(b, at), live = scalar(b, rows.size());
            Device<float> y(b, in.size());
            b.norm_rotate({{capacity, live.data()},
                           dp.data(),
                           dx.data(),
                           w,
                           1e-5f,
                           s.heads,
                           angles.table,
                           in_place ? dx.data() : y.data()});
            return rows_of(in_place ? dx.get() : y.get(), static_cast<size_t>(width), rows.size());
        };
        for (int i = 0; i < pool; ++i) {
            const std::vector<float> got = floats_of(run({i}, 1, false)[0]);
            std::vector<double> wanted, bound;
            for (int h = 0; h < s.heads; ++h)
                for (const double v : angles.apply(x.data() + i * width + h * s.dim, weight, 1e-5f,
                                                   position[static_cast<size_t>(i)])) {
                    wanted.push_back(v);
                    bound.push_back(2e-6 * (1.0 + std::fabs(v)));
                }
            expect_near(got, wanted, bound, format("row %d, %d heads of %d", i, s.heads, s.dim));
            expect_same(floats_of(run({i}, 1, true)[0]), got, "in place");
        }
        check_purity(format("norm_rotate, %d heads of %d", s.heads, s.dim), random, pool,
                     [&](const std::vector<int>& rows, int capacity) { return run(rows, capacity, false); });
    }
}

// An entry in another slot or sequence, keys in the place of values, values that are rotated, rounding other
// than once, a position without a page that is written all the same.
KDT_CASE(write_key_value) {
    Random random(43);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        const bool bf16 = precision == "bf16";
        struct Shape {
            int heads, dim;
        };
        for (const Shape s : {Shape{2, 16}, Shape{1, 10}, Shape{9, 128}}) {
            const int keys = s.heads * s.dim, width = 2 * keys, positions = 256, rows = 12, capacity = 15;
            const Angles angles(b, random, s.dim, positions);
            const std::vector<float> weight = random_values(random, static_cast<size_t>(s.dim));
            const float* w = b.upload_vector(weight, "norm");
            const std::vector<int32_t> table = {4, 2, -1, 0, 7, 1, 3, -1};  // two sequences of four pages
            const int page_count = 6;                                       // page 7 does not exist
            const Device<int32_t> page_table(b, table);
            const std::vector<float> k = random_values(random, static_cast<size_t>(capacity * keys));
            const std::vector<float> v = random_values(random, static_cast<size_t>(capacity * keys));
            const Device<float> dk(b, k), dv(b, v);
            std::vector<int32_t> position;
            for (int i = 0; i < capacity; ++i) position.push_back(i < 4 ? 62 + i : (i * 37 + 5) % positions);
            const Device<int32_t> dp(b, position), live = scalar(b, rows);
            for (const bool to_block : {false, true})
                for (const int sequence : {0, 1}) {
                    const Device<int32_t> ds = scalar(b, static_cast<size_t>(sequence));
                    const size_t element = bf16 ? 2 : 4, slots = static_cast<size_t>(page_count * kPageSize);
                    Device<uint8_t> pages(b, slots * static_cast<size_t>(width) * element);
                    Device<uint8_t> block(b, static_cast<size_t>(kMaxBlockRows * width) * element);
                    b.write_key_value({{capacity, live.data()},
                                       dp.data(),
                                       ds.data(),
                                       to_block,
                                       dk.data(),
                                       dv.data(),
                                       w,
                                       1e-5f,
                                       s.heads,
                                       angles.table,
                                       {pages.data(), block.data(), page_table.data(), page_count, 4}});
                    const std::vector<uint8_t> got_pages = pages.get(), got_block = block.get();
                    const std::vector<uint8_t>& bytes = to_block ? got_block : got_pages;
                    std::vector<bool> written(bytes.size() / element / static_cast<size_t>(width), false);
                    std::vector<float> got;
                    std::vector<double> wanted, bound;
                    for (int i = 0; i < rows; ++i) {
                        size_t slot = static_cast<size_t>(i);
                        const int p = position[static_cast<size_t>(i)];
                        if (!to_block) {
                            const int page = table[static_cast<size_t>(sequence * 4 + p / kPageSize)];
                            if (page < 0 || page >= page_count) continue;
                            slot = static_cast<size_t>(page * kPageSize + p % kPageSize);
                        }
                        written[slot] = true;
                        for (int c = 0; c < width; ++c) {
                            const size_t at = slot * static_cast<size_t>(width) + static_cast<size_t>(c);
                            float x;
                            if (bf16) {
                                uint16_t half;
                                std::memcpy(&half, bytes.data() + at * 2, 2);
                                x = bf16_value(half);
                            } else {
                                std::memcpy(&x, bytes.data() + at * 4, 4);
                            }
                            got.push_back(x);
                        }
                        for (int h = 0; h < s.heads; ++h)
                            for (const double y :
                                 angles.apply(k.data() + i * keys + h * s.dim, weight, 1e-5f, p)) {
                                wanted.push_back(y);
                                bound.push_back(bf16 ? std::fabs(y) * 0x1p-8 + 3e-6
                                                     : 2e-6 * (1.0 + std::fabs(y)));
                            }
                        for (int c = 0; c < keys; ++c) {  // values: rounded once, nothing else
                            const float y = v[static_cast<size_t>(i * keys + c)];
                            wanted.push_back(static_cast<double>(bf16 ? bf16_round(y) : y));
                            bound.push_back(0.0);
                        }
                    }
                    expect_near(got, wanted, bound,
                                format("%s, %d heads of %d", precision.c_str(), s.heads, s.dim));
                    for (size_t slot = 0; slot < written.size(); ++slot)
                        for (size_t i = 0; i < static_cast<size_t>(width) * element && !written[slot]; ++i)
                            if (bytes[slot * static_cast<size_t>(width) * element + i] != 0xFF)
                                failed("slot %zu belongs to no row and was written", slot);
                    for (const uint8_t byte : to_block ? got_pages : got_block)
                        if (byte != 0xFF) failed("the other of pages and block was written");
                }
        }
    }
}
}  // namespace kdt::testing
