// Attention of a draft block: how it is cut, and softmax over what each row sees.
#include <algorithm>
#include <cmath>

#include "backend/cuda/draft_plan.h"
#include "testing.h"

namespace kdt::testing {

namespace {

struct Heads {
    int heads, kv_heads, head_dim;
    std::string text() const { return format("%d heads on %d of %d", heads, kv_heads, head_dim); }
    bool tensor_cores() const { return cuda::block_attend_has_tensor_cores(head_dim); }
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
    std::vector<uint8_t> bytes(const std::vector<float>& v) const { return cache_bytes(v, bf16); }
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

}  // namespace kdt::testing
