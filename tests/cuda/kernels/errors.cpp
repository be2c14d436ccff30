// What the backend refuses, and that it goes on working afterwards; and the fixed tables.
#include <cmath>

#include "backend/cuda/plan.h"
#include "testing.h"

namespace kdt::testing {

namespace {

template <class F>
void expect_error(ErrorCode code, const std::string& part, const F& f) {
    count_checks(1);
    try {
        f();
    } catch (const Error& e) {
        if (e.code() != code || std::string(e.what()).find(part) == std::string::npos)
            failed("the error was '%s' (%s); %s and '%s' were expected", e.what(), error_code_name(e.code()),
                   error_code_name(code), part.c_str());
        return;
    }
    failed("nothing was refused; '%s' was expected", part.c_str());
}

}  // namespace

// A NaN or infinite weight or scale that gets into the model, a message without the tensor's name or the row.
KDT_CASE(weights_that_are_not_finite_are_refused) {
    Random random(61);
    Backend& b = backend("bf16");
    TestMatrix m = random_matrix(random, WeightKind::f32, DType::f32, 40, 70);
    m.f32[33 * 70 + 69] = NAN;
    expect_error(ErrorCode::not_finite, "layer.w has NaN or infinity in row 33",
                 [&] { b.upload_matrix(m.host(), "layer.w"); });
    m = random_matrix(random, WeightKind::bf16, DType::f32, 20, 64);
    m.bf16[5] = 0x7F80;
    expect_error(ErrorCode::not_finite, "row 0", [&] { b.upload_matrix(m.host(), "layer.w"); });
    m = random_matrix(random, WeightKind::w4a16, DType::bf16, 20, 64);
    m.scales16[39] = 0xFF80;
    expect_error(ErrorCode::not_finite, "scale that is NaN", [&] { b.upload_matrix(m.host(), "layer.w"); });
    m = random_matrix(random, WeightKind::w4a16, DType::f32, 20, 64);
    m.scales[2] = 3e38f;
    expect_error(ErrorCode::not_finite, "in row 1 of 20", [&] { b.upload_matrix(m.host(), "layer.w"); });
    expect_error(ErrorCode::not_finite, "norm has nan at index 1",
                 [&] { b.upload_vector(std::vector<float>{1.0f, NAN}, "norm"); });
    m = random_matrix(random, WeightKind::w4a16, DType::f32, 20, 64);
    b.upload_matrix(m.host(), "a good one");
}

KDT_CASE(shapes_that_do_not_fit_are_refused) {
    Random random(62);
    Backend& b = backend("bf16");
    HostMatrix h = random_matrix(random, WeightKind::w4a16, DType::f32, 4, 64).host();
    h.in = 40;
    expect_error(ErrorCode::bad_model, "groups of 32", [&] { b.upload_matrix(h, "w"); });
    h.in = 0;
    expect_error(ErrorCode::bad_model, "shape [4, 0]", [&] { b.upload_matrix(h, "w"); });
    const Weight w = b.upload_matrix(random_matrix(random, WeightKind::f32, DType::f32, 16, 32).host(), "w");
    const Weight v = b.upload_matrix(random_matrix(random, WeightKind::f32, DType::f32, 16, 64).host(), "v");
    expect_error(ErrorCode::invalid_argument, "one shape was expected",
                 [&] { b.gated_linear({{1, nullptr}, nullptr, w, v, nullptr}); });
    const Weight t = b.upload_matrix(random_matrix(random, WeightKind::f32, DType::f32, 32, 16).host(), "t");
    const Weight t16 =
        b.upload_matrix(random_matrix(random, WeightKind::bf16, DType::f32, 32, 16).host(), "t");
    const std::vector<Weight> gate = {w, w}, down = {t, t16};
    expect_error(ErrorCode::unsupported, "expert 1 stores its weights in another type",
                 [&] { b.make_experts(gate, gate, down, "layer.experts"); });
    CudaOptions o;
    o.precision = "fp8";
    expect_error(ErrorCode::invalid_argument, "precision is 'fp8'", [&] { make_cuda_backend(o); });
    o.precision = "bf16";
    o.device = 99;
    expect_error(ErrorCode::invalid_argument, "GPU 99 was asked for", [&] { make_cuda_backend(o); });
}

// Numbers that fix bits. If one of these fails, docs/numerics.md and every recorded result must change with
// it.
KDT_CASE(fixed_tables) {
    using namespace kdt::cuda;
    struct Split {
        int out, in, splits;
    };
    for (const Split& s : std::vector<Split>{{4096, 7168, 8},
                                             {1536, 7168, 8},
                                             {576, 7168, 8},
                                             {36864, 7168, 1},
                                             {7168, 18432, 4},
                                             {7168, 2048, 4},
                                             {12288, 1536, 2},
                                             {163840, 7168, 1},
                                             {2048, 256, 1},
                                             {64, 511, 1},
                                             {64, 512, 2}})
        if (k_splits(row_tiles(s.out), s.in) != s.splits)
            failed("[%d, %d] is cut into %d splits; %d were expected", s.out, s.in,
                   k_splits(row_tiles(s.out), s.in), s.splits);
    count_checks(11);
    for (int s = 0; s < 300; ++s) {
        const int start = split_start(s), end = split_start(s + 1);
        if (start % kChunkSize != 0 || end <= start || split_of(start) != s || split_of(end - 1) != s)
            failed("split %d covers [%d, %d)", s, start, end);
    }
    for (int g = 0; g < 60; ++g) {
        const int start = group_start(g), end = group_start(g + 1);
        if (end <= start || group_of(start) != g || group_of(end - 1) != g ||
            split_start(split_of(start)) != start)
            failed("group %d covers [%d, %d)", g, start, end);
    }
    count_checks(360);
    // whatever the row count, a block fits and its pieces add up
    for (const int rows : {1, 8, 9, 16, 17, 32, 33, 65, 500})
        for (const WeightKind kind : {WeightKind::f32, WeightKind::bf16, WeightKind::w4a16})
            for (const int tiles : {1, 2, 9, 36, 256, 2304, 10240}) {
                const int nt = token_tiles(rows), warps = gemm_warps(tiles, 8, nt, kind),
                          stages = gemm_stages(warps, kind);
                const int step =
                    kind == WeightKind::w4a16 ? block_bytes(kind, true) : block_bytes(kind, false) / 2;
                const int bytes =
                    (nt * 64 + 127) / 128 * 128 +
                    std::max(2 * nt * 8 * chunk_columns(warps, nt) * 2 + warps * stages * 2 * step,
                             nt * 8 * (warps * 32 + 4) * 4);
                const int items = nt * chunk_columns(warps, nt), threads = warps * 32;
                if (bytes > 101376 || items > (nt == 9 ? 3 : 2) * threads ||
                    (stages != 2 && stages != 4 && stages != 8 && stages != 16))
                    failed("%d rows, %d tiles: %d warps, %d stages, %d bytes, %d items", rows, tiles, warps,
                           stages, bytes, items);
                count_checks(1);
            }
}

}  // namespace kdt::testing
