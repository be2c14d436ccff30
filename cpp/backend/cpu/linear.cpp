// Matrix products of the CPU backend.
#include "backend/cpu/linear.h"

#include <cstring>

#include "core/error.h"

namespace kdt::cpu {

namespace {

// Multiply-adds below which a product stays on one thread.
constexpr int64_t kWorthAThread = 1 << 16;

}  // namespace

void CpuBackend::linear(const LinearArgs& args) {
    const Op op(*this);
    const PackedMatrix& w = packed(args.w);
    const int live = live_rows(args.rows);
    for (int first = 0; first < live; first += kMaxDotRows) {
        const int rows = std::min(kMaxDotRows, live - first);
        const float* x[kMaxDotRows];
        for (int r = 0; r < rows; ++r) x[r] = args.x + static_cast<ptrdiff_t>(first + r) * w.in;
        float* const y = args.y + static_cast<ptrdiff_t>(first) * w.out;
        split_outputs(w, rows, [&](int begin, int end, Local& local) {
            dot_pieces({x, rows, w}, begin, end, local.out.data(), [&](int at, int count, const float* sums) {
                for (int r = 0; r < rows; ++r) {
                    float* to = y + static_cast<ptrdiff_t>(r) * w.out + at;
                    const float* from = sums + r * kTileColumns;
                    if (args.accumulate)
                        k_.add(from, count, to);
                    else
                        std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
                }
            });
        });
    }
}

void CpuBackend::gated_linear(const GatedLinearArgs& args) {
    const Op op(*this);
    const PackedMatrix& gate = packed(args.gate);
    const PackedMatrix& up = packed(args.up);
    if (gate.in != up.in || gate.out != up.out)
        fail(ErrorCode::invalid_argument, "gate is [%d, %d] and up [%d, %d]; one shape was expected",
             gate.out, gate.in, up.out, up.in);
    const int live = live_rows(args.rows);
    for (int first = 0; first < live; first += kMaxDotRows) {
        const int rows = std::min(kMaxDotRows, live - first);
        const float* x[kMaxDotRows];
        float* y[kMaxDotRows];
        for (int r = 0; r < rows; ++r) {
            x[r] = args.x + static_cast<ptrdiff_t>(first + r) * gate.in;
            y[r] = args.y + static_cast<ptrdiff_t>(first + r) * gate.out;
        }
        split_outputs(gate, rows, [&](int begin, int end, Local& local) {
            gated_pieces(x, y, rows, gate, up, begin, end, local);
        });
    }
}

void CpuBackend::gated_pieces(const float* const* x, float* const* y, int rows, const PackedMatrix& gate,
                              const PackedMatrix& up, int begin, int end, Local& local) {
    float* const u = local.out.data() + size_t{kMaxDotRows} * kTileColumns;
    dot_pieces({x, rows, gate}, begin, end, local.out.data(), [&](int at, int count, const float* g) {
        dot_pieces({x, rows, up}, at, at + count, u, [&](int, int, const float*) {});
        for (int r = 0; r < rows; ++r)
            k_.silu_mul(g + r * kTileColumns, u + r * kTileColumns, count, y[r] + at);
    });
}

void CpuBackend::head_linear(const HeadLinear& h) {
    // Items: pieces of a group's outputs, group by group.
    const int pieces = (h.count + kTileColumns - 1) / kTileColumns;
    const int64_t work = static_cast<int64_t>(h.rows) * h.w.in * std::min(h.count, kTileColumns);
    pool_.split(static_cast<int64_t>(h.groups) * pieces, kWorthAThread / std::max<int64_t>(work, 1) + 1,
                [&](int64_t first, int64_t last, int thread) {
                    Local& local = local_[static_cast<size_t>(thread)];
                    for (int64_t item = first; item < last; ++item) {
                        const int group = static_cast<int>(item / pieces);
                        const int begin = static_cast<int>(item % pieces) * kTileColumns;
                        const int end = std::min(h.count, begin + kTileColumns);
                        head_piece(h, group, begin, end, local);
                    }
                });
}

void CpuBackend::head_piece(const HeadLinear& h, int group, int begin, int end, Local& local) {
    for (int first = 0; first < h.rows; first += kMaxDotRows) {
        const int rows = std::min(kMaxDotRows, h.rows - first);
        const float* x[kMaxDotRows];
        for (int r = 0; r < rows; ++r) x[r] = h.x + (first + r) * h.x_row + group * h.x_group;
        const int base = group * h.count;
        dot_pieces({x, rows, h.w}, base + begin, base + end, local.out.data(),
                   [&](int at, int count, const float* sums) {
                       for (int r = 0; r < rows; ++r)
                           std::memcpy(h.out + (first + r) * h.out_row + group * h.out_group + (at - base),
                                       sums + r * kTileColumns, static_cast<size_t>(count) * sizeof(float));
                   });
    }
}

void CpuBackend::project_value(const ProjectValueArgs& args) {
    const Op op(*this);
    const PackedMatrix& w = packed(args.value_up);
    if (w.in != args.latent || w.out != args.heads * args.v)
        fail(ErrorCode::invalid_argument, "value_up is [%d, %d]; [%d * %d, %d] was expected", w.out, w.in,
             args.heads, args.v, args.latent);
    HeadLinear h;
    h.rows = live_rows(args.rows);
    h.groups = args.heads;
    h.count = args.v;
    h.x = args.o;
    h.x_row = static_cast<ptrdiff_t>(args.heads) * args.latent;
    h.x_group = args.latent;
    h.w = w;
    h.out = args.out;
    h.out_row = static_cast<ptrdiff_t>(args.heads) * args.v;
    h.out_group = args.v;
    head_linear(h);
}

}  // namespace kdt::cpu
