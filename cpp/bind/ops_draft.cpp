// The draft model's ops on numpy arrays.
#include "bind/ops_support.h"

namespace kdt {

using namespace ops_support;

namespace {

// pages [page_count, kPageSize, 2, kv_heads, head_dim] and block [entries, 2, kv_heads, head_dim].
template <class Pages, class Block>
DraftCache draft_cache(const Pages& pages, const Block& block, const In<int32_t, 2>& page_table) {
    expect("slots of a page", dim(pages, 1), kPageSize);
    expect("parts of an entry", dim(pages, 2), 2);
    for (size_t axis = 1; axis < 4; ++axis)
        expect("shape of a block entry", dim(block, axis), dim(pages, axis + 1));
    expect("entries of the block", dim(block, 0), kMaxBlockRows);
    return {const_cast<float*>(pages.data()), const_cast<float*>(block.data()), page_table.data(),
            dim(pages, 0), dim(page_table, 1)};
}

void check_sequence(int sequence, const In<int32_t, 2>& page_table) {
    if (sequence < 0 || sequence >= dim(page_table, 0))
        fail(ErrorCode::invalid_argument, "sequence %d of %d", sequence, dim(page_table, 0));
}

}  // namespace

void bind_draft_ops(nb::module_& m) {
    m.def(
        "keep_taps",
        [](In<int32_t, 1> path, int first, In<float, 2> taps, InOut<float, 2> kept, int threads,
           std::string isa) {
            expect("columns of kept", dim(kept, 1), dim(taps, 1));
            for (size_t j = 0; j < path.shape(0); ++j)
                if (path(j) >= dim(taps, 0))
                    fail(ErrorCode::invalid_argument, "row %d of %d rows of taps", path(j), dim(taps, 0));
            const int32_t length = dim(path, 0), row = first;
            backend(threads, isa)
                .keep_taps(
                    {&length, path.data(), &row, dim(kept, 0), dim(kept, 1), taps.data(), kept.data()});
        },
        "path"_a.noconvert(), "first"_a, "taps"_a.noconvert(), "kept"_a.noconvert(), "threads"_a = 1,
        "isa"_a = "", "Copies rows of taps to rows first, first + 1, ... of `kept`, in place.");
    m.def(
        "norm_rotate",
        [](In<float, 3> x, In<float, 1> weight, float eps, In<float, 2> cos, In<float, 2> sin,
           In<int32_t, 1> position, KDT_RUN_PARAMS) {
            const RopeTable rope = rope_table(cos, sin, false);
            expect("width of a head", dim(x, 2), rope.rope);
            expect("length of weight", dim(weight, 0), rope.rope);
            expect("rows of position", dim(position, 0), dim(x, 0));
            auto out = make<float>({x.shape(0), x.shape(1), x.shape(2)});
            run(KDT_RUN, dim(x, 0), [&](Backend& b, Rows rows) {
                b.norm_rotate(
                    {rows, position.data(), x.data(), weight.data(), eps, dim(x, 1), rope, out.data()});
            });
            return out;
        },
        "x"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "cos"_a.noconvert(), "sin"_a.noconvert(),
        "position"_a.noconvert(), KDT_RUN_ARGS,
        "rope(rms_norm(x)) over the last axis of x [rows, heads, head_dim], pairs (j, j + head_dim / 2).");
    m.def(
        "write_key_value",
        [](In<float, 3> k, In<float, 3> v, In<float, 1> weight, float eps, In<float, 2> cos, In<float, 2> sin,
           In<int32_t, 1> position, int sequence, bool to_block, InOut<float, 5> pages, InOut<float, 4> block,
           In<int32_t, 2> page_table, KDT_RUN_PARAMS) {
            const RopeTable rope = rope_table(cos, sin, false);
            const DraftCache cache = draft_cache(pages, block, page_table);
            check_sequence(sequence, page_table);
            expect("heads of k", dim(k, 1), dim(pages, 3));
            expect("width of a head", dim(k, 2), rope.rope);
            expect("width of an entry's head", dim(pages, 4), rope.rope);
            expect("length of weight", dim(weight, 0), rope.rope);
            for (size_t axis = 0; axis < 3; ++axis) expect("shape of v", dim(v, axis), dim(k, axis));
            expect("rows of position", dim(position, 0), dim(k, 0));
            const int32_t row = sequence;
            run(KDT_RUN, dim(k, 0), [&](Backend& b, Rows rows) {
                b.write_key_value({rows, position.data(), &row, to_block, k.data(), v.data(), weight.data(),
                                   eps, dim(k, 1), rope, cache});
            });
        },
        "k"_a.noconvert(), "v"_a.noconvert(), "weight"_a.noconvert(), "eps"_a, "cos"_a.noconvert(),
        "sin"_a.noconvert(), "position"_a.noconvert(), "sequence"_a, "to_block"_a, "pages"_a.noconvert(),
        "block"_a.noconvert(), "page_table"_a.noconvert(), KDT_RUN_ARGS,
        "Writes [rope(rms_norm(k)) | v] of each row to its page slot, or to its entry of the block, in "
        "place.");
    m.def(
        "block_attend",
        [](In<float, 3> q, In<int32_t, 1> position, int start, int sequence, In<float, 5> pages,
           In<float, 4> block, In<int32_t, 2> page_table, int entries, int window, bool causal, float scale,
           KDT_RUN_PARAMS) {
            const DraftCache cache = draft_cache(pages, block, page_table);
            check_sequence(sequence, page_table);
            expect("width of an entry's head", dim(pages, 4), dim(q, 2));
            expect("rows of position", dim(position, 0), dim(q, 0));
            auto out = make<float>({q.shape(0), q.shape(1), q.shape(2)});
            const int32_t first = start, row = sequence;
            run(KDT_RUN, dim(q, 0), [&](Backend& b, Rows rows) {
                BlockAttendArgs args{};
                args.rows = rows;
                args.position = position.data();
                args.start = &first;
                args.sequence = &row;
                args.q = q.data();
                args.cache = cache;
                args.heads = dim(q, 1);
                args.kv_heads = dim(pages, 3);
                args.head_dim = dim(q, 2);
                args.block = entries;
                args.window = window;
                args.causal = causal;
                args.scale = scale;
                args.out = out.data();
                b.block_attend(args);
            });
            return out;
        },
        "q"_a.noconvert(), "position"_a.noconvert(), "start"_a, "sequence"_a, "pages"_a.noconvert(),
        "block"_a.noconvert(), "page_table"_a.noconvert(), "entries"_a, "window"_a, "causal"_a, "scale"_a,
        KDT_RUN_ARGS,
        "Attention of q [rows, heads, head_dim] over committed positions and the block: [rows, heads, "
        "head_dim].");
}

}  // namespace kdt
