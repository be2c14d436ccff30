// Paths through the kernels that the reduced shapes of their own tests do not take, for the sake of their
// barriers.
#include <cmath>

#include "../kernels/testing.h"

namespace kdt::testing {

// Activations of more columns than a block's shared memory has room for: they come in pieces, and a piece may
// only be overwritten once every warp has read it.
KDT_CASE(products_of_activations_in_pieces) {
    Random random(311);
    Backend& b = backend("bf16");
    const int rows = 16, out = 32;
    for (const WeightKind kind : {WeightKind::bf16, WeightKind::w4a16})
        for (const int in : {2048, 32768}) {
            const Weight w = b.upload_matrix(random_matrix(random, kind, DType::bf16, out, in).host(), "w");
            const std::vector<float> x = random_values(random, static_cast<size_t>(rows * in));
            const Device<float> dx(b, x);
            const Device<int32_t> all = scalar(b, rows), one = scalar(b, 1);
            Device<float> y(b, static_cast<size_t>(rows * out)), alone(b, static_cast<size_t>(out));
            b.linear({{rows, all.data()}, dx.data(), w, y.data(), false});
            const std::vector<float> got = y.get();
            for (const int row : {0, 7, 15}) {
                b.linear({{1, one.data()}, dx.data() + row * in, w, alone.data(), false});
                expect_same(got.data() + row * out, alone.get().data(), static_cast<size_t>(out),
                            format("row %d of %d inputs", row, in));
            }
        }
}

// More pairs of a row and a head than blocks are wanted: a block takes several splits one after another, and
// the next one's keys come into the ring that the last one is read from. All heads hold the same, and give
// the same.
KDT_CASE(block_attend_of_several_splits_a_block) {
    Random random(312);
    Backend& b = backend("bf16");
    const int heads = 300, dim = 8, committed = 300, pages = (committed + kPageSize - 1) / kPageSize;
    const auto repeated = [&](int rows, int parts) {  // [rows, parts, heads, dim], as bf16
        std::vector<uint16_t> all;
        for (int r = 0; r < rows * parts; ++r) {
            std::vector<uint16_t> one;
            for (int c = 0; c < dim; ++c) one.push_back(bf16_bits(random.symmetric()));
            for (int h = 0; h < heads; ++h) all.insert(all.end(), one.begin(), one.end());
        }
        return all;
    };
    const Device<uint16_t> cached(b, repeated(pages * kPageSize, 2)), block(b, repeated(kMaxBlockRows, 2));
    std::vector<int32_t> table;
    for (int i = 0; i < pages; ++i) table.push_back(i);
    const Device<int32_t> dtable(b, table);
    std::vector<float> q;
    for (int h = 0; h < heads; ++h)
        for (int c = 0; c < dim; ++c) q.push_back(0.25f * static_cast<float>(c - 3));
    const Device<float> dq(b, q);
    const Device<int32_t> position = scalar(b, committed), live = scalar(b, 1), start = scalar(b, committed),
                          sequence = scalar(b, 0);
    Device<float> out(b, q.size());
    BlockAttendArgs args{};
    args.rows = {1, live.data()};
    args.position = position.data();
    args.start = start.data();
    args.sequence = sequence.data();
    args.q = dq.data();
    args.cache = {const_cast<uint16_t*>(cached.data()), const_cast<uint16_t*>(block.data()), dtable.data(),
                  pages, pages};
    args.heads = args.kv_heads = heads;
    args.head_dim = dim;
    args.block = 1;
    args.scale = 1.0f;
    args.out = out.data();
    b.block_attend(args);
    const std::vector<float> got = out.get();
    for (int c = 0; c < dim; ++c)
        if (!(std::fabs(got[static_cast<size_t>(c)]) <= 1.0f))
            failed("a mean of values is %g", static_cast<double>(got[static_cast<size_t>(c)]));
    for (int h = 1; h < heads; ++h)
        expect_same(got.data() + h * dim, got.data(), static_cast<size_t>(dim), format("head %d", h));
}

}  // namespace kdt::testing
