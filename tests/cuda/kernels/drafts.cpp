// The draft model's ops, and whole drafts against the CPU backend.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "backend/cuda/draft_plan.h"
#include "core/rotary.h"
#include "draft/dflash.h"
#include "testing.h"

namespace kdt::testing {

namespace {

std::vector<float> random_values(Random& random, size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = random.symmetric();
    return x;
}

struct Heads {
    int heads, kv_heads, head_dim;
    std::string text() const { return format("%d heads on %d of %d", heads, kv_heads, head_dim); }
    bool tensor_cores() const { return cuda::block_attend_has_tensor_cores(head_dim); }
};

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

// A cache of random keys and values: one sequence in shuffled pages, and a block behind it. What is neither
// is NaN.
struct Scene {
    Backend& b;
    const Heads shape;
    const bool bf16;
    const int width, pages_each, page_count;
    std::vector<int32_t> table;
    std::vector<float> page_values, block_values;  // rounded; [slots, width], [kMaxBlockRows, width]
    Device<uint8_t> pages, block;
    Device<int32_t> page_table;
    DraftCache cache;
    float scale;

    Scene(Backend& backend, Random& random, const Heads& s, int positions)
        : b(backend),
          shape(s),
          bf16(backend.cache_dtype() == DType::bf16),
          width(2 * s.kv_heads * s.head_dim),
          pages_each((positions + kPageSize - 1) / kPageSize),
          page_count(pages_each + 3),
          table(make_table(random)),
          page_values(values(random, static_cast<size_t>(page_count * kPageSize))),
          block_values(values(random, kMaxBlockRows)),
          pages(b, bytes(page_values)),
          block(b, bytes(block_values)),
          page_table(b, table),
          cache{pages.data(), block.data(), page_table.data(), page_count, pages_each},
          scale(3.0f / std::sqrt(static_cast<float>(s.head_dim))) {}

    std::vector<int32_t> make_table(Random& random) const {  // two sequences; the tests read the second
        const std::vector<int> order = random.permutation(page_count);
        std::vector<int32_t> t(static_cast<size_t>(pages_each), -1);
        t.insert(t.end(), order.begin(), order.begin() + pages_each);
        return t;
    }
    std::vector<float> values(Random& random, size_t rows) const {
        std::vector<float> v = random_values(random, rows * static_cast<size_t>(width));
        if (bf16)
            for (float& x : v) x = bf16_round(x);
        return v;
    }
    std::vector<uint8_t> bytes(const std::vector<float>& v) const {
        std::vector<uint8_t> out(v.size() * (bf16 ? 2 : 4));
        for (size_t i = 0; i < v.size(); ++i) {
            const uint16_t half = bf16_bits(v[i]);
            if (bf16)
                std::memcpy(out.data() + 2 * i, &half, 2);
            else
                std::memcpy(out.data() + 4 * i, &v[i], 4);
        }
        return out;
    }
    float* at_position(int p) {
        const int page = table[static_cast<size_t>(pages_each + p / kPageSize)];
        return page_values.data() + static_cast<ptrdiff_t>(page * kPageSize + p % kPageSize) * width;
    }
    float* at(int start, int p) {
        return p < start ? at_position(p) : block_values.data() + static_cast<ptrdiff_t>(p - start) * width;
    }
    void upload() {
        pages.set(bytes(page_values));
        block.set(bytes(block_values));
    }
};

struct View {  // what the block is and what its rows see
    int start, block, window;
    bool causal;
    int first(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
    int last(int position) const {
        int end = start + block - 1;
        if (causal) end = std::min(end, position);
        return window > 0 ? std::min(end, position + window - 1) : end;
    }
    std::string text() const {
        return format("%d committed, a block of %d, window %d%s", start, block, window,
                      causal ? ", causal" : "");
    }
};

struct Row {
    std::vector<float> q;
    int position;
};

Row random_row(Random& random, const Scene& s, int position) {
    Row row{random_values(random, static_cast<size_t>(s.shape.heads * s.shape.head_dim)), position};
    for (float& v : row.q) v *= 2.0f;
    return row;
}

std::vector<std::vector<uint8_t>> attend(const Scene& s, const View& view,
                                         const std::vector<const Row*>& rows, int capacity) {
    const size_t width = static_cast<size_t>(s.shape.heads * s.shape.head_dim),
                 n = static_cast<size_t>(capacity);
    std::vector<float> q(n * width, NAN);
    std::vector<int32_t> position(n, 0);
    for (size_t i = 0; i < rows.size(); ++i) {
        std::copy(rows[i]->q.begin(), rows[i]->q.end(), q.begin() + static_cast<ptrdiff_t>(i * width));
        position[i] = rows[i]->position;
    }
    Backend& b = s.b;
    const Device<float> dq(b, q);
    const Device<int32_t> dp(b, position), live = scalar(b, rows.size());
    const Device<int32_t> start = scalar(b, static_cast<size_t>(view.start)), sequence = scalar(b, 1);
    Device<float> out(b, n * width);
    BlockAttendArgs args{};
    args.rows = {capacity, live.data()};
    args.position = dp.data();
    args.start = start.data();
    args.sequence = sequence.data();
    args.q = dq.data();
    args.cache = s.cache;
    args.heads = s.shape.heads;
    args.kv_heads = s.shape.kv_heads;
    args.head_dim = s.shape.head_dim;
    args.block = view.block;
    args.window = view.window;
    args.causal = view.causal;
    args.scale = s.scale;
    args.out = out.data();
    b.block_attend(args);
    return rows_of(out.get(), width, rows.size());
}

std::vector<float> floats_of(const std::vector<uint8_t>& bytes) {
    std::vector<float> v(bytes.size() / 4);
    std::memcpy(v.data(), bytes.data(), bytes.size());
    return v;
}

void compare_with_reference(Scene& s, const View& view, const Row& row, const std::vector<uint8_t>& bytes,
                            const std::string& what) {
    const int dim = s.shape.head_dim, group = s.shape.heads / s.shape.kv_heads;
    const int first = view.first(row.position), last = view.last(row.position);
    const bool rounded = s.bf16 && s.shape.tensor_cores();
    const std::vector<float> all = floats_of(bytes);
    std::vector<float> got;
    std::vector<double> wanted, bound;
    const int step = last - first > 2000 ? std::max(1, s.shape.heads / 4) : 1;
    for (int h = 0; h < s.shape.heads; h += step) {
        got.insert(got.end(), all.begin() + h * dim, all.begin() + (h + 1) * dim);
        const float* q = row.q.data() + h * dim;
        std::vector<double> score;
        double greatest = -1e300;
        for (int p = first; p <= last; ++p) {
            const float* k = s.at(view.start, p) + h / group * dim;
            double sum = 0.0;
            for (int c = 0; c < dim; ++c)
                sum += static_cast<double>(rounded ? bf16_round(q[c]) : q[c]) * static_cast<double>(k[c]);
            score.push_back(sum * static_cast<double>(s.scale));
            greatest = std::max(greatest, score.back());
        }
        std::vector<double> o(static_cast<size_t>(dim), 0.0), size(o);
        double total = 0.0;
        for (int p = first; p <= last; ++p) {
            const double w = std::exp(score[static_cast<size_t>(p - first)] - greatest);
            const float* v = s.at(view.start, p) + (s.shape.kv_heads + h / group) * dim;
            total += w;
            for (int c = 0; c < dim; ++c) {
                o[static_cast<size_t>(c)] += w * static_cast<double>(v[c]);
                size[static_cast<size_t>(c)] += w * std::fabs(static_cast<double>(v[c]));
            }
        }
        for (size_t c = 0; c < o.size(); ++c) {
            wanted.push_back(o[c] / total);
            bound.push_back((rounded ? 0x1p-8 : 6e-6) * size[c] / total + 1e-7);
        }
    }
    expect_near(got, wanted, bound, what);
}

std::vector<Heads> shapes() {
    if (options().small) return {{4, 2, 16}, {17, 1, 10}, {6, 2, 72}, {20, 1, 128}};
    return {{4, 2, 16}, {17, 1, 10}, {6, 2, 72}, {64, 8, 128}, {8, 1, 128}, {40, 2, 64}, {6, 2, 320}};
}

std::vector<View> views(const Heads& s) {
    if (options().small) {
        if (s.head_dim > 16) return {{130, 8, 0, false}, {260, 5, 70, true}};
        return {{0, 1, 0, false},   {0, 16, 0, false},   {1, 8, 0, true},     {63, 8, 0, false},
                {64, 33, 0, false}, {65, 8, 1, false},   {200, 8, 7, false},  {254, 8, 100, false},
                {256, 8, 3, true},  {300, 16, 57, true}, {601, 8, 300, false}};
    }
    std::vector<View> list = {{0, 1, 0, false}, {0, 16, 0, false}, {1, 8, 0, true}, {40000, 16, 4096, false}};
    for (const int start : {63, 64, 65, 255, 257, 1000, 4095, 4096, 8190, 8192, 9300})
        for (const int window : {0, 1, 70, 4096, 9000})
            list.push_back({start, start % 2 == 0 ? 8 : 33, window, window % 10 == 0 && window > 0});
    return list;
}

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
        for (const Heads s : {Heads{2, 2, 16}, Heads{1, 1, 10}, Heads{9, 9, 128}}) {
            const int keys = s.kv_heads * s.head_dim, width = 2 * keys, positions = 256, rows = 12,
                      capacity = 15;
            const Angles angles(b, random, s.head_dim, positions);
            const std::vector<float> weight = random_values(random, static_cast<size_t>(s.head_dim));
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
                                       s.kv_heads,
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
                        for (int h = 0; h < s.kv_heads; ++h)
                            for (const double y :
                                 angles.apply(k.data() + i * keys + h * s.head_dim, weight, 1e-5f, p)) {
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
                    expect_near(got, wanted, bound, format("%s, %s", precision.c_str(), s.text().c_str()));
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

// The plan of splits: a gap or an overlap, a row that meets more splits than it has slots for.
KDT_CASE(block_splits_cover_every_position) {
    for (const int window : {0, 1, 7, 256, 4096, 8192, 8193, 1 << 24}) {
        const cuda::BlockSplits splits = cuda::BlockSplits::of_window(window);
        int before = -1;
        for (int p = 0; p < 70000; ++p) {
            const int s = splits.of(p);
            if (s != before && (s != before + 1 || splits.start(s) != p))
                failed("position %d, window %d", p, window);
            if (splits.start(s) > p || splits.start(s + 1) <= p || splits.start(s) % kChunkSize != 0)
                failed("position %d is not in its split, window %d", p, window);
            before = s;
            count_checks(1);
        }
        for (const int positions : {1, 2, 255, 256, 257, 258, 5000, 8192, 70000}) {
            const int parts = cuda::block_parts(window, positions);
            for (int p = 0; p < positions; p += positions < 300 ? 1 : 97) {
                const View view{positions, 0, window, false};
                const int met = splits.of(view.last(p)) - splits.of(view.first(p)) + 1;
                if (met > parts) failed("window %d: %d splits and %d slots", window, met, parts);
                count_checks(1);
            }
        }
    }
}

// A key that is missed or counted twice at a border of chunks, pages, splits, windows or the block; the wrong
// key head; a wrong scale.
KDT_CASE(block_attend_is_softmax_over_what_is_seen) {
    Random random(44);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Heads& shape : shapes()) {
            int longest = 0;
            for (const View& view : views(shape)) longest = std::max(longest, view.start);
            if (precision == "f32" && shape.heads > 20) longest = std::min(longest, 9300);
            Scene s(b, random, shape, longest + 1);
            for (const View& view : views(shape)) {
                if (view.start > longest) continue;
                std::vector<Row> rows;
                for (int i = 0; i < view.block; ++i) rows.push_back(random_row(random, s, view.start + i));
                std::vector<const Row*> list;
                for (const Row& row : rows) list.push_back(&row);
                const auto got = attend(s, view, list, view.block + 2);
                for (size_t i = 0; i < rows.size(); i += rows.size() > 3 ? rows.size() / 3 : 1)
                    compare_with_reference(s, view, rows[i], got[i],
                                           format("%s, %s, %s, row %zu", precision.c_str(),
                                                  shape.text().c_str(), view.text().c_str(), i));
            }
        }
    }
}

// Where a key lies must fix no bit: a position that is committed is read from a page instead of the block.
KDT_CASE(committed_keys_equal_block_keys) {
    Random random(45);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Heads& shape : shapes()) {
            const std::vector<int> ends = options().small ? std::vector<int>{9, 64, 65, 258}
                                                          : std::vector<int>{9, 64, 65, 258, 1030, 8200};
            Scene s(b, random, shape, ends.back() + 1);
            for (const int end : ends)
                for (const int window : {0, 40}) {
                    const Row row = random_row(random, s, end - 1);
                    std::vector<uint8_t> wanted;
                    for (const int block : {1, 2, 8}) {
                        const View view{end - block, block, window, false};
                        for (int j = 0; j < block; ++j)
                            std::copy_n(s.at_position(end - block + j), s.width,
                                        s.block_values.begin() + static_cast<ptrdiff_t>(j * s.width));
                        s.upload();
                        const auto got = attend(s, view, {&row}, 1)[0];
                        if (wanted.empty()) wanted = got;
                        expect_same(got, wanted,
                                    format("%s, %s, %s", precision.c_str(), shape.text().c_str(),
                                           view.text().c_str()));
                    }
                }
        }
    }
}

// A row that feels its neighbours, its place, the row count, or a key that it does not see, whatever that
// holds.
KDT_CASE(block_attend_rows_are_pure) {
    Random random(46);
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        for (const Heads& shape : shapes()) {
            if (options().small && shape.head_dim > 16) continue;
            const int length = options().small ? 130 : 300;
            for (const View& view : {View{length, 12, 0, true}, View{length - 10, 8, 50, false}}) {
                Scene s(b, random, shape, length + 1);
                std::vector<Row> rows;
                for (int i = 0; i < 3; ++i) rows.push_back(random_row(random, s, view.start + 3 * i));
                rows.push_back(random_row(random, s, 70));
                check_purity(
                    format("%s, %s, %s", precision.c_str(), shape.text().c_str(), view.text().c_str()),
                    random, static_cast<int>(rows.size()), [&](const std::vector<int>& list, int capacity) {
                        std::vector<Row> extra;
                        extra.reserve(list.size());
                        std::vector<const Row*> all;
                        for (const int i : list) {
                            if (i >= 0) {
                                all.push_back(&rows[static_cast<size_t>(i)]);
                                continue;
                            }
                            Row bad = random_row(random, s, view.start + random.below(view.block));
                            for (float& v : bad.q) v = garbage(-1 - i, random);
                            extra.push_back(bad);
                            all.push_back(&extra.back());
                        }
                        return attend(s, view, all, capacity);
                    });
                for (const Row& row : rows) {
                    const Row other = random_row(random, s, view.start + view.block - 1);
                    const auto wanted = attend(s, view, {&row, &other}, 2)[0];
                    const std::vector<float> pages = s.page_values, block = s.block_values;
                    for (int p = 0; p < view.start + view.block; ++p)
                        if (p < view.first(row.position) || p > view.last(row.position))
                            std::fill_n(s.at(view.start, p), s.width, garbage(random.below(2), random));
                    s.upload();
                    expect_same(attend(s, view, {&row, &other}, 2)[0], wanted,
                                "beside keys that are not seen");
                    s.page_values = pages;
                    s.block_values = block;
                    s.upload();
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------------------------------------------
// whole drafts

namespace {

constexpr int kPages = 6;

DFlashConfig draft_config(int kind) {
    DFlashConfig c{};
    c.hidden_size = kind == 2 ? 52 : 64;
    c.vocab_size = kind == 2 ? 301 : 256;
    c.num_hidden_layers = kind == 0 ? 2 : 3;
    c.num_attention_heads = kind == 1 ? 6 : 8;
    c.num_key_value_heads = 2;
    c.head_dim = kind == 1 ? 18 : kind == 2 ? 24 : 16;
    c.intermediate_size = 80;
    c.rms_norm_eps = 1e-5;
    c.rotary.dim = c.head_dim;
    c.rotary.theta = 10000.0;
    c.rotary.amplitude = 1.0;
    c.block_rows = options().small ? 4 : kind == 0 ? 8 : kind == 1 ? 6 : 16;
    c.mask_token_id = 17;
    c.target_layers = {3, 0};
    c.window = kind == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 90, 7};
    c.causal = kind == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 0, 1};
    return c;
}

// A random draft model on one backend, with an executor's side of its memory.
struct Draft {
    Backend& b;
    DFlashModel model;
    Device<int32_t> page_table;
    std::unique_ptr<DFlashRunner> runner;

    Draft(Backend& backend, const DFlashConfig& c, WeightKind kind)
        : b(backend), page_table(b, std::vector<int32_t>{9, 9, 9, 9, 9, 9, 4, 1, 7, 0, 3, 5}) {
        Random random(77);
        model.config = c;
        const auto matrix = [&](int out, int in) {
            return b.upload_matrix(random_matrix(random, kind, DType::f32, out, in).host(), "w");
        };
        const auto norm = [&](int n) {
            std::vector<float> w = random_values(random, static_cast<size_t>(n));
            for (float& v : w) v = 1.0f + 0.3f * v;
            return b.upload_vector(w, "norm");
        };
        model.weights.fc = matrix(c.hidden_size, c.tap_width());
        model.weights.hidden_norm = norm(c.hidden_size);
        model.weights.norm = norm(c.hidden_size);
        for (int i = 0; i < c.num_hidden_layers; ++i) {
            DFlashLayer w;
            w.input_norm = norm(c.hidden_size);
            w.q = matrix(c.query_width(), c.hidden_size);
            w.k = matrix(c.key_width(), c.hidden_size);
            w.v = matrix(c.key_width(), c.hidden_size);
            w.o = matrix(c.hidden_size, c.query_width());
            w.q_norm = norm(c.head_dim);
            w.k_norm = norm(c.head_dim);
            w.post_attention_norm = norm(c.hidden_size);
            w.gate = matrix(c.intermediate_size, c.hidden_size);
            w.up = matrix(c.intermediate_size, c.hidden_size);
            w.down = matrix(c.hidden_size, c.intermediate_size);
            model.weights.layers.push_back(w);
        }
        model.embed = matrix(c.vocab_size, c.hidden_size);
        model.head = matrix(c.vocab_size, c.hidden_size);
        DFlashPlace place;
        place.page_table = page_table.data();
        place.page_count = 10;
        place.pages_per_sequence = kPages;
        place.sequences = 2;
        place.context = kPages * kPageSize;
        place.rows = 200;
        runner = std::make_unique<DFlashRunner>(b, model, place);
    }

    // Positions first .. first + count - 1 of sequence 1, whose taps are rows of `taps`.
    void feed(const std::vector<float>& taps, int first, int count, bool through_kept) {
        const size_t width = static_cast<size_t>(model.config.tap_width());
        b.upload(runner->taps(), taps.data() + static_cast<size_t>(first) * width,
                 static_cast<size_t>(count) * width * sizeof(float));
        if (!through_kept) return runner->feed_taps(1, first, count);
        std::vector<int32_t> path(kMaxTreeRows);
        std::iota(path.begin(), path.end(), 0);
        const Device<int32_t> dl = scalar(b, static_cast<size_t>(count)), dp(b, path),
                              df = scalar(b, DFlashRunner::kKeptRows);
        b.keep_taps({dl.data(), dp.data(), df.data(), runner->kept_capacity(), static_cast<int>(width),
                     runner->taps(), runner->kept()});
        runner->feed_kept(1, first, count);
        b.synchronize();
    }
};

struct Drafted {
    std::vector<float> features, logits, entries;
    Proposal proposal;
};

// Drafts behind `length` positions that were fed in batches of these sizes, repeated.
Drafted draft_behind(Draft& d, const std::vector<float>& taps, int length, const std::vector<int>& batches,
                     bool through_kept) {
    Drafted r;
    const size_t hidden = static_cast<size_t>(d.model.config.hidden_size);
    size_t i = 0;
    for (int at = 0; at < length;) {
        const int n = std::min(batches[i++ % batches.size()], length - at);
        d.feed(taps, at, n, through_kept);
        const std::vector<float> f = d.runner->features(n);
        r.features.insert(r.features.end(), f.begin(),
                          f.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(n) * hidden));
        at += n;
    }
    d.runner->draft(1, length, 42, r.proposal);
    r.logits = d.runner->logits();
    const std::vector<int32_t> pages = {4, 1, 7, 0, 3, 5};
    for (int layer = 0; layer < d.model.config.num_hidden_layers; ++layer) {
        const std::vector<float> e = d.runner->cache(layer, pages, length);
        r.entries.insert(r.entries.end(), e.begin(), e.end());
    }
    return r;
}

void expect_close(const std::vector<float>& got, const std::vector<float>& wanted, double tolerance,
                  const std::string& what) {
    double largest = 1.0;
    for (const float v : wanted) largest = std::max(largest, std::fabs(static_cast<double>(v)));
    std::vector<double> values(wanted.begin(), wanted.end());
    expect_near(got, values, std::vector<double>(wanted.size(), tolerance * largest), what);
}

}  // namespace

// Anything that the CUDA ops, or the way in which a draft strings them together, compute otherwise than the
// CPU's; a feature, a key or a proposal that depends on how positions were batched, or on the drafts before.
KDT_CASE(drafts_equal_the_cpu_backend_and_themselves) {
    Random random(47);
    const auto cpu = make_cpu_backend({1, ""});
    cpu->reserve_workspace({kMaxBlockRows, 64, 8, 1, 1, 1, 1, 1, 512, kPages * kPageSize});
    for (int kind = 0; kind < 3; ++kind) {
        const DFlashConfig c = draft_config(kind);
        const WeightKind weights = kind == 2 ? WeightKind::bf16 : WeightKind::f32;
        const std::vector<float> taps =
            random_values(random, static_cast<size_t>(kPages * kPageSize * c.tap_width()));
        Draft reference(*cpu, c, weights);
        for (const std::string precision : {"f32", "bf16"}) {
            if (options().small && kind != (precision == "f32" ? 1 : 2)) continue;
            Draft d(backend(precision), c, weights);
            const double tolerance = precision == "f32" ? 1e-5 : 4e-2;
            const std::vector<int> lengths =
                options().small ? std::vector<int>{70} : std::vector<int>{1, 64, 70, 300};
            for (const int length : lengths) {
                const std::string what =
                    format("%s, config %d, %d positions", precision.c_str(), kind, length);
                const Drafted wanted = draft_behind(reference, taps, length, {200}, false);
                const Drafted got = draft_behind(d, taps, length, {200}, false);
                expect_close(got.features, wanted.features, tolerance, what + ": features");
                expect_close(got.entries, wanted.entries, tolerance, what + ": keys and values");
                expect_close(got.logits, wanted.logits, tolerance, what + ": logits");
                expect_close(got.proposal.table_logp, wanted.proposal.table_logp, tolerance,
                             what + ": table");
                if (got.proposal.depth != c.drafts() ||
                    got.proposal.table_token.size() != wanted.proposal.table_token.size())
                    failed("%s: a table of %d depths", what.c_str(), got.proposal.depth);

                const Drafted again = draft_behind(d, taps, length, {1, 5, 33}, true);
                expect_same(again.features, got.features, what + ": features in other batches");
                expect_same(again.entries, got.entries, what + ": entries in other batches");
                expect_same(again.logits, got.logits, what + ": logits in other batches");
                expect_same(again.proposal.table_token, got.proposal.table_token,
                            what + ": tokens in other batches");
                expect_same(again.proposal.table_logp, got.proposal.table_logp,
                            what + ": table in other batches");
            }
        }
    }
}

}  // namespace kdt::testing
