// Paths through the kernels that the reduced shapes of their own tests do not take, for the sake of their
// barriers.
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

}  // namespace kdt::testing
