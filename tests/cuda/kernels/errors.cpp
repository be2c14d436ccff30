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
    // every split of a row has exactly one block, whatever the number of blocks
    for (const int keys : {1, 64, 129, 1024, 4097, 8192, 40000, 131072})
        for (const int blocks : {1, 2, 5, 66, 132}) {
            bool whole = share_border(0, blocks, keys) == 0 &&
                         share_border(blocks, blocks, keys) == split_of(keys - 1) + 1;
            for (int b = 0; b < blocks; ++b)
                whole = whole && share_border(b, blocks, keys) <= share_border(b + 1, blocks, keys);
            if (!whole) failed("%d keys are not shared by %d blocks", keys, blocks);
        }
    count_checks(340);
    // whatever the row count, a block fits, every row tile has a warp and every token a block
    const auto check_cut = [](const GemmCut& cut, int rows, int out, bool gated, int tokens, int most,
                              int bytes) {
        const int tiles = cut.blocks * cut.pairs * (gated ? 1 : 2);
        if (tiles < row_tiles(out) || cut.groups * tokens < rows || cut.pairs < 1 || cut.pairs > most ||
            bytes > 101376)
            failed("%d rows, %d outputs: %d blocks of %d pairs, %d groups, %d bytes", rows, out, cut.blocks,
                   cut.pairs, cut.groups, bytes);
        count_checks(1);
    };
    for (const int rows : {1, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 80, 81, 128, 129, 500})
        for (const int out : {1, 16, 33, 144, 576, 4096, 36864, 163840})
            for (const bool gated : {false, true})
                for (const Machine& machine : {Machine{1, {1, 1, 1, 1}}, Machine{132, {132, 66, 31, 14}},
                                               Machine{188, {188, 90, 40, 20}}}) {
                    const int splits = k_splits(row_tiles(out) * (gated ? 2 : 1), 7168);
                    for (const int tokens : {8, 16}) {
                        const GemmCut cut =
                            cut_gemm(out, 1, gated, rows, tokens, 0, splits, machine, 9, 9, false);
                        const int columns = (column_blocks(7168) + splits - 1) / splits * kBlockColumns;
                        check_cut(cut, rows, out, gated, tokens, 9,
                                  tokens * 8 + few_activation_bytes(columns, tokens, true) +
                                      tokens * (cut.pairs * 32 + 4) * 4);
                    }
                    const ManyShape shape = many_shape(rows);
                    for (const int step_bytes :
                         {576, 640, 1024, 2048}) {  // w4a16, with f32 scales, bf16, f32
                        const int most = many_pairs(shape.groups, step_bytes),
                                  columns = step_bytes < 1024 ? 64 : 32;
                        const int slots = many_slots(shape.all(), most, columns, step_bytes);
                        const GemmCut cut = cut_gemm(out, 1, gated, rows, shape.all() * 8, 0, splits, machine,
                                                     most, most, false);
                        check_cut(cut, rows, out, gated, shape.all() * 8, most,
                                  128 + std::max(slots * many_step_bytes(shape.all(), cut.pairs, columns,
                                                                         step_bytes),
                                                 shape.all() * 8 * (cut.pairs * 32 + 4) * 4));
                        if (slots < 3) failed("%d slots of %d token tiles", slots, shape.all());
                    }
                }
    // activations: what fits is whole turns of the ring, and all of it where all of it was asked for
    for (const bool alone : {false, true})
        for (const int tokens : {1, 2, 5, 8, 9, 16})
            for (const int columns : {64, 256, 320, 896, 1536, 7168, 18432}) {
                const int most = alone ? kFewActivationBytesAlone : kFewActivationBytes;
                const int bytes = few_activation_bytes(columns, tokens, alone);
                const int chunk = few_chunk_columns(bytes, tokens);
                if (bytes > most || chunk % kFewRound != 0 || tokens * few_row_bytes(chunk) > bytes ||
                    (bytes < most && chunk < columns))
                    failed("%d tokens, %d columns: %d bytes hold %d", tokens, columns, bytes, chunk);
                count_checks(1);
            }
}

}  // namespace kdt::testing
