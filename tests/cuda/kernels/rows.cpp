// Ops that treat each row by itself, and weights on their way to the device.
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

std::vector<int> widths() {
    return options().small ? std::vector<int>{37, 72, 1028, 2052}
                           : std::vector<int>{37, 72, 1536, 2048, 3001, 7168, 9000};
}

}  // namespace

// A rate of a buffer that was not read, and a size of the L2 in other units.
KDT_CASE(read_rate_and_cache) {
    Backend& b = backend("bf16");
    const size_t cache = b.last_level_cache();
    if (cache < (size_t{1} << 20) || cache > (size_t{1} << 32)) failed("the L2 has %zu bytes", cache);
    const double rate = b.read_rate(options().small ? size_t{1} << 20 : size_t{1} << 30, 2);
    if (!(rate > 1e3 && rate < 1e14)) failed("memory is read at %g bytes per second", rate);
    count_checks(2);
}

// A wrong row or column of the embedding table, in either type.
KDT_CASE(embed_copies_rows) {
    Random random(11);
    Backend& b = backend("bf16");
    for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16})
        for (const int width : widths()) {
            const int vocab = 53;
            const TestMatrix m = random_matrix(random, kind, DType::f32, vocab, width);
            const Weight table = b.upload_matrix(m.host(), "table");
            std::vector<int32_t> token;
            for (int i = 0; i < 20; ++i) token.push_back(random.below(vocab));
            const Device<int32_t> dt(b, token);
            const Device<int32_t> live = scalar(b, 17);
            Device<float> y(b, token.size() * static_cast<size_t>(width));
            b.embed({{20, live.data()}, dt.data(), table, y.data()});
            const auto rows = rows_of(y.get(), static_cast<size_t>(width), 17);
            for (size_t i = 0; i < rows.size(); ++i)
                expect_same(reinterpret_cast<const float*>(rows[i].data()),
                            m.value.data() + static_cast<size_t>(token[i] * width),
                            static_cast<size_t>(width), format("row %zu of width %d", i, width));
        }
}

// A sum over the wrong columns, a stride that is taken for the width, rows that are not pure, in place.
KDT_CASE(rms_norm) {
    Random random(12);
    Backend& b = backend("bf16");
    for (const int width : widths()) {
        const int stride = width + 5, pool = 4;
        const float eps = 1e-6f;
        const std::vector<float> x = random_values(random, static_cast<size_t>(pool * stride));
        const std::vector<float> weight = random_values(random, static_cast<size_t>(width));
        const float* w = b.upload_vector(weight, "norm");
        const auto run = [&](const std::vector<int>& rows, int capacity) {
            std::vector<float> in(static_cast<size_t>(capacity * stride), NAN);
            for (size_t i = 0; i < rows.size(); ++i)
                for (int c = 0; c < stride; ++c)
                    in[i * static_cast<size_t>(stride) + static_cast<size_t>(c)] =
                        rows[i] < 0 ? garbage(-1 - rows[i], random)
                                    : x[static_cast<size_t>(rows[i] * stride + c)];
            const Device<float> dx(b, in);
            const Device<int32_t> live = scalar(b, rows.size());
            Device<float> y(b, static_cast<size_t>(capacity * width));
            b.rms_norm({{capacity, live.data()}, dx.data(), stride, w, eps, width, y.data()});
            return rows_of(y.get(), static_cast<size_t>(width), rows.size());
        };
        for (int i = 0; i < pool; ++i) {
            const std::vector<float> got = floats_of(run({i}, 1)[0]);
            const float* row = x.data() + i * stride;
            double sum = 0.0;
            for (int c = 0; c < width; ++c) sum += static_cast<double>(row[c]) * static_cast<double>(row[c]);
            const double r = 1.0 / std::sqrt(sum / width + static_cast<double>(eps));
            std::vector<double> wanted, bound;
            for (int c = 0; c < width; ++c) {
                wanted.push_back(static_cast<double>(row[c]) * r *
                                 static_cast<double>(weight[static_cast<size_t>(c)]));
                bound.push_back(1e-6 * std::fabs(wanted.back()) + 1e-30);
            }
            expect_near(got, wanted, bound, format("width %d", width));

            // in place
            std::vector<float> in(row, row + width);
            Device<float> y(b, in);
            const Device<int32_t> live = scalar(b, 1);
            b.rms_norm({{1, live.data()}, y.data(), width, w, eps, width, y.data()});
            expect_same(y.get(), got, "in place");
        }
        // x on its way elsewhere, in rows further apart: as it was, and nothing behind the live rows
        for (const int apart : {width + 3, 3 * width}) {
            const int rows = 3;
            const std::vector<float> before(static_cast<size_t>((rows + 1) * apart), -7.0f);
            const Device<float> dx(b, x);
            Device<float> y(b, static_cast<size_t>((rows + 1) * width)), copy(b, before);
            const Device<int32_t> live = scalar(b, rows);
            b.rms_norm(
                {{rows + 1, live.data()}, dx.data(), stride, w, eps, width, y.data(), copy.data(), apart});
            std::vector<float> wanted = before;
            for (int i = 0; i < rows; ++i)
                std::copy_n(x.data() + i * stride, width, wanted.data() + i * apart);
            expect_same(copy.get(), wanted, format("a copy of width %d, rows %d apart", width, apart));
        }
        check_purity(format("rms_norm of width %d", width), random, pool, run);
    }
}

// A latent in the wrong slot, a page taken for another, RoPE at the wrong position, rounding other than once.
KDT_CASE(write_latent_and_commit) {
    Random random(13);
    struct Shape {
        int latent, rope;
        bool interleaved;
    };
    for (const std::string precision : {"bf16", "f32"}) {
        Backend& b = backend(precision);
        const bool bf16 = precision == "bf16";
        for (const Shape s : {Shape{72, 24, true}, Shape{64, 16, false}, Shape{512, 64, true}}) {
            const int width = s.latent + s.rope, positions = 200, pages_each = 4, sequences = 3,
                      page_count = 17;
            std::vector<float> cos, sin;
            for (int i = 0; i < positions * s.rope / 2; ++i) {
                cos.push_back(random.symmetric());
                sin.push_back(random.symmetric());
            }
            const Device<float> dc(b, cos), ds(b, sin);
            const RopeTable rope{dc.data(), ds.data(), s.rope, positions, s.interleaved};
            const std::vector<float> weight = random_values(random, static_cast<size_t>(s.latent));
            const float* w = b.upload_vector(weight, "norm");

            std::vector<int32_t> table;
            const std::vector<int> order = random.permutation(page_count);
            for (int i = 0; i < sequences * pages_each; ++i)
                table.push_back(i % pages_each == pages_each - 1 ? -1 : order[static_cast<size_t>(i)]);
            const Device<int32_t> page_table(b, table);

            const int rows = 12, capacity = 15;
            std::vector<int32_t> sequence, position, ancestor_count;
            for (int i = 0; i < capacity; ++i) {
                sequence.push_back(i % sequences);
                position.push_back(i < 3 ? 63 + i : 3 + 13 * i % 170);
                ancestor_count.push_back(i % 4 == 3 ? 2 : 0);
            }
            const std::vector<float> ckv = random_values(random, static_cast<size_t>(capacity * width));
            const Device<float> dx(b, ckv);
            const Device<int32_t> dseq(b, sequence), dpos(b, position), dcount(b, ancestor_count);
            const Device<int32_t> live = scalar(b, rows);
            RowBatch batch;
            batch.sequence = dseq.data();
            batch.position = dpos.data();
            batch.ancestor_count = dcount.data();

            const size_t element = bf16 ? 2 : 4, slots = static_cast<size_t>(page_count) * kPageSize;
            Device<uint8_t> pages(b, slots * static_cast<size_t>(width) * element);
            Device<uint8_t> scratch(b, static_cast<size_t>(kMaxTreeRows * width) * element);
            const LatentCache cache{pages.data(), scratch.data(), page_table.data(), page_count, pages_each};
            b.write_latent({{capacity, live.data()}, batch, dx.data(), w, 1e-6f, s.latent, rope, cache});

            const auto read = [&](const std::vector<uint8_t>& bytes, size_t slot, int c) {
                const size_t at = slot * static_cast<size_t>(width) + static_cast<size_t>(c);
                if (!bf16) {
                    float v;
                    std::memcpy(&v, bytes.data() + at * 4, 4);
                    return v;
                }
                uint16_t v;
                std::memcpy(&v, bytes.data() + at * 2, 2);
                return bf16_value(v);
            };
            const std::vector<uint8_t> got_pages = pages.get(), got_scratch = scratch.get();
            std::vector<bool> page_slot_used(slots, false);
            std::vector<float> got;
            std::vector<double> wanted, bound;
            for (int i = 0; i < rows; ++i) {
                const size_t at = static_cast<size_t>(i);
                size_t slot = at;
                const bool to_scratch = ancestor_count[at] > 0;
                if (!to_scratch) {
                    const int page =
                        table[static_cast<size_t>(sequence[at] * pages_each + position[at] / kPageSize)];
                    if (page < 0) continue;
                    slot =
                        static_cast<size_t>(page) * kPageSize + static_cast<size_t>(position[at] % kPageSize);
                    page_slot_used[slot] = true;
                }
                const float* x = ckv.data() + i * width;
                double sum = 0.0;
                for (int c = 0; c < s.latent; ++c)
                    sum += static_cast<double>(x[c]) * static_cast<double>(x[c]);
                const double r = 1.0 / std::sqrt(sum / s.latent + 1e-6);
                std::vector<double> row;
                for (int c = 0; c < s.latent; ++c)
                    row.push_back(static_cast<double>(x[c]) * r *
                                  static_cast<double>(weight[static_cast<size_t>(c)]));
                row.resize(static_cast<size_t>(width));
                for (int j = 0; j < s.rope / 2; ++j) {
                    const int first = s.interleaved ? 2 * j : j,
                              second = s.interleaved ? 2 * j + 1 : j + s.rope / 2;
                    const size_t angle = static_cast<size_t>(position[at] * s.rope / 2 + j);
                    const double x0 = static_cast<double>(x[s.latent + first]),
                                 x1 = static_cast<double>(x[s.latent + second]);
                    const double co = static_cast<double>(cos[angle]), si = static_cast<double>(sin[angle]);
                    row[static_cast<size_t>(s.latent + first)] = x0 * co - x1 * si;
                    row[static_cast<size_t>(s.latent + second)] = x1 * co + x0 * si;
                }
                for (int c = 0; c < width; ++c) {
                    got.push_back(read(to_scratch ? got_scratch : got_pages, slot, c));
                    wanted.push_back(row[static_cast<size_t>(c)]);
                    bound.push_back((bf16 ? 0.00391 : 1e-6) * std::fabs(wanted.back()) + 3e-7);
                }
            }
            expect_near(got, wanted, bound,
                        format("%s latents of %d + %d", precision.c_str(), s.latent, s.rope));
            for (size_t slot = 0; slot < slots; ++slot)
                if (!page_slot_used[slot])
                    for (size_t i = 0; i < static_cast<size_t>(width) * element; ++i)
                        if (got_pages[slot * static_cast<size_t>(width) * element + i] != 0xFF)
                            failed("slot %zu was written, which no row names", slot);

            // the same row in another place gives the same bytes
            const auto run = [&](const std::vector<int>& list, int room) {
                std::vector<float> x(static_cast<size_t>(room * width), NAN);
                std::vector<int32_t> seq(static_cast<size_t>(room), 0), pos(seq), count(seq);
                for (size_t i = 0; i < list.size(); ++i) {
                    pos[i] = list[i] < 0 ? 5 : 30 * list[i];
                    count[i] = 1;
                    for (int c = 0; c < width; ++c)
                        x[i * static_cast<size_t>(width) + static_cast<size_t>(c)] =
                            list[i] < 0 ? garbage(-1 - list[i], random)
                                        : ckv[static_cast<size_t>(list[i] * width + c)];
                }
                const Device<float> in(b, x);
                const Device<int32_t> a1(b, seq), a2(b, pos), a3(b, count), n = scalar(b, list.size());
                RowBatch rb;
                rb.sequence = a1.data();
                rb.position = a2.data();
                rb.ancestor_count = a3.data();
                Device<uint8_t> to(b, static_cast<size_t>(room * width) * element);
                const LatentCache other{pages.data(), to.data(), page_table.data(), page_count, pages_each};
                b.write_latent({{room, n.data()}, rb, in.data(), w, 1e-6f, s.latent, rope, other});
                return rows_of(to.get(), static_cast<size_t>(width) * element, list.size());
            };
            check_purity(format("%s write_latent %d + %d", precision.c_str(), s.latent, s.rope), random, 4,
                         run);

            // commit moves bits and nothing else
            std::vector<uint8_t> fill(scratch.size());
            for (uint8_t& byte : fill) byte = static_cast<uint8_t>(random.below(255));
            scratch.set(fill);
            const int length = 7, start = 60;
            std::vector<int32_t> path = {0, 3, 4, 9, 33, 60, 64};
            path.resize(kMaxTreeRows, -1);
            const Device<int32_t> dl = scalar(b, length), dp(b, path), dst = scalar(b, start),
                                  seq1 = scalar(b, 1);
            const std::vector<uint8_t> before = pages.get();
            b.commit({dl.data(), dp.data(), dst.data(), seq1.data(), width, cache, 1, 0, 0});
            std::vector<uint8_t> expected = before;
            for (int j = 0; j < length; ++j) {
                const int p = start + j;
                const size_t slot =
                    static_cast<size_t>(table[static_cast<size_t>(pages_each + p / kPageSize)]) * kPageSize +
                    static_cast<size_t>(p % kPageSize);
                std::memcpy(expected.data() + slot * static_cast<size_t>(width) * element,
                            fill.data() + static_cast<size_t>(path[static_cast<size_t>(j)] * width) * element,
                            static_cast<size_t>(width) * element);
            }
            expect_same(pages.get(), expected, "pages after a commit");
        }
    }
}

// A layer left out or taken for another, a row more or less than the walk's length, a page of another
// sequence, bytes beside the slots.
KDT_CASE(commit_moves_every_layer) {
    Random random(16);
    for (int i = 0; i < 220; ++i) {
        Backend& b = backend(i % 2 == 0 ? "bf16" : "f32");
        const size_t element = i % 2 == 0 ? 2 : 4;
        const int layers = random.between(1, 5), width = random.below(3) == 0 ? random.between(1, 90) : 72,
                  sequences = random.between(1, 3), pages_each = random.between(2, 4),
                  page_count = sequences * pages_each + random.below(3);
        const int length = i % 5 == 0 ? kMaxTreeRows : random.below(20),
                  start = random.below(pages_each * kPageSize - length + 1),
                  sequence = random.below(sequences);
        const size_t row = static_cast<size_t>(width) * element;
        const size_t page_distance = static_cast<size_t>(page_count) * kPageSize * row + 64,
                     scratch_distance = kMaxTreeRows * row + 32;
        std::vector<int32_t> table(static_cast<size_t>(sequences * pages_each));
        const std::vector<int> order = random.permutation(page_count);
        for (size_t p = 0; p < table.size(); ++p) table[p] = order[p];
        if (i % 7 == 0) table[static_cast<size_t>(random.below(static_cast<int>(table.size())))] = -1;
        std::vector<int32_t> path(kMaxTreeRows, INT32_MAX);
        for (int j = 0; j < length; ++j) path[static_cast<size_t>(j)] = random.below(kMaxTreeRows);
        std::vector<uint8_t> latents(scratch_distance * static_cast<size_t>(layers));
        for (uint8_t& byte : latents) byte = static_cast<uint8_t>(random.below(255));
        const Device<uint8_t> scratch(b, latents);
        Device<uint8_t> pages(b, page_distance * static_cast<size_t>(layers));
        const Device<int32_t> page_table(b, table), dp(b, path),
            dl = scalar(b, static_cast<size_t>(length)), ds = scalar(b, static_cast<size_t>(start)),
            seq = scalar(b, static_cast<size_t>(sequence));
        b.commit({dl.data(),
                  dp.data(),
                  ds.data(),
                  seq.data(),
                  width,
                  {pages.data(), scratch.data(), page_table.data(), page_count, pages_each},
                  layers,
                  page_distance,
                  scratch_distance});
        std::vector<uint8_t> expected(pages.size(), 0xFF);
        for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer)
            for (int j = 0; j < length; ++j) {
                const int p = start + j,
                          page = table[static_cast<size_t>(sequence * pages_each + p / kPageSize)];
                if (page < 0) continue;
                const size_t slot =
                    static_cast<size_t>(page) * kPageSize + static_cast<size_t>(p % kPageSize);
                std::memcpy(expected.data() + layer * page_distance + slot * row,
                            latents.data() + layer * scratch_distance +
                                static_cast<size_t>(path[static_cast<size_t>(j)]) * row,
                            row);
            }
        expect_same(pages.get(), expected, format("commit %d: %d rows of %d layers", i, length, layers));
    }
}

// Recorded ops that keep old values, or run while they are recorded.
KDT_CASE(recorded_ops_see_new_values) {
    Random random(15);
    Backend& b = backend("bf16");
    const int width = 96, rows = 6;
    const std::vector<float> weight = random_values(random, static_cast<size_t>(width));
    const float* w = b.upload_vector(weight, "norm");
    const Weight m =
        b.upload_matrix(random_matrix(random, WeightKind::bf16, DType::f32, 50, width).host(), "m");
    Device<float> x(b, size_t{rows * width}), h(b, size_t{rows * width}), y(b, size_t{rows * 50}),
        plain(b, size_t{rows * 50});
    Device<int32_t> live = scalar(b, 0);
    const auto ops = [&](float* to) {
        b.rms_norm({{rows, live.data()}, x.data(), width, w, 1e-6f, width, h.data()});
        b.linear({{rows, live.data()}, h.data(), m, to, false});
    };
    const std::unique_ptr<Graph> graph = b.record([&] { ops(y.data()); });
    rows_of(y.get(), 50, 0);  // nothing has run
    for (const int n : {1, 6, 3}) {
        x.set(random_values(random, static_cast<size_t>(rows * width)));
        live.set({n});
        y.poison();
        plain.poison();
        graph->launch();
        ops(plain.data());
        const auto got = y.get();
        rows_of(got, 50, static_cast<size_t>(n));
        expect_same(got.data(), plain.get().data(), static_cast<size_t>(n) * 50,
                    format("%d rows, recorded", n));
    }
}

// Ops aside that start before what they read is there, or are not waited for: queued and recorded. The ones
// aside are long beside the others, so that who does not wait for them reads NaN.
KDT_CASE(ops_aside_are_joined) {
    Random random(16);
    Backend& b = backend("bf16");
    const int rows = 3, hidden = options().small ? 256 : 2048, inner = options().small ? 512 : 16384;
    const auto matrix = [&](int out, int in, const char* name) {
        return b.upload_matrix(random_matrix(random, WeightKind::bf16, DType::f32, out, in).host(), name);
    };
    const Weight first = matrix(hidden, hidden, "first"), gate = matrix(inner, hidden, "gate"),
                 up = matrix(inner, hidden, "up"), down = matrix(hidden, inner, "down"),
                 last = matrix(64, hidden, "last");
    const auto floats = [&](int width) { return Device<float>(b, static_cast<size_t>(rows * width)); };
    Device<float> x = floats(hidden), h = floats(hidden), act = floats(inner), beside = floats(hidden),
                  plain = floats(64), y = floats(64);
    const Device<int32_t> live = scalar(b, rows);
    const Rows all{rows, live.data()};
    const auto ops = [&](float* to, bool aside) {
        b.linear({all, x.data(), first, h.data(), false});
        const auto long_ones = [&] {
            b.gated_linear({all, h.data(), gate, up, act.data()});
            b.linear({all, act.data(), down, beside.data(), false});
        };
        if (aside)
            b.aside(long_ones);
        else
            long_ones();
        b.linear({all, h.data(), last, to, false});
        if (aside) b.join_aside();
        b.linear({all, beside.data(), last, to, true});
    };
    const std::unique_ptr<Graph> graph = b.record([&] { ops(y.data(), true); });
    for (int i = 0; i < (options().small ? 2 : 10); ++i) {
        x.set(random_values(random, static_cast<size_t>(rows * hidden)));
        ops(plain.data(), false);
        const std::vector<float> expected = plain.get();
        for (const bool recorded : {false, true}) {
            for (Device<float>* buffer : {&h, &act, &beside, &y}) buffer->poison();
            recorded ? graph->launch() : ops(y.data(), true);
            expect_same(y.get().data(), expected.data(), expected.size(),
                        recorded ? "recorded aside" : "queued aside");
        }
    }
}

// The wrong row, a stride taken for the width.
KDT_CASE(gather_rows) {
    Random random(14);
    Backend& b = backend("bf16");
    const int width = 300, stride = 700, rows = 9, capacity = 12;
    const std::vector<float> x = random_values(random, 20 * width);
    std::vector<int32_t> index;
    for (int i = 0; i < capacity; ++i) index.push_back(random.below(20));
    const Device<float> dx(b, x);
    const Device<int32_t> di(b, index), live = scalar(b, rows);
    Device<float> y(b, static_cast<size_t>(capacity * stride));
    b.gather_rows({{capacity, live.data()}, di.data(), dx.data(), width, y.data(), stride});
    const std::vector<float> got = y.get();
    for (int i = 0; i < rows; ++i)
        expect_same(got.data() + i * stride, x.data() + index[static_cast<size_t>(i)] * width, width,
                    "a row");
    rows_of(std::vector<float>(got.begin() + width, got.begin() + stride), 1, 0);  // between rows: untouched
    rows_of(std::vector<float>(got.begin() + rows * stride, got.end()), 1, 0);
}

}  // namespace kdt::testing
