#include "backend/cuda/repack.h"

#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;

__device__ __forceinline__ bool finite(float x) {
    return fabsf(x) < INFINITY;
}

// A thread makes eight columns (8 t .. 8 t + 7 of one step) of one row of the destination, padding included;
// the thread of column 0 of each step of a w4a16 row also places that group's scale.
template <WeightKind Kind>
__global__ void __launch_bounds__(kThreads) repack(const RepackArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int blocks = column_blocks(a.in), units = blocks * 8;
    const long long i = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
    const int local = static_cast<int>(i / units), column = static_cast<int>(i % units) * 8;
    const int row = a.first_row + local;
    if (row >= row_tiles(a.out) * kTileRows || local >= (a.rows + kTileRows - 1) / kTileRows * kTileRows)
        return;
    const bool inside = local < a.rows;
    const int present = inside ? max(0, min(8, a.in - column)) : 0;
    bool bad = false;
    if constexpr (Kind == WeightKind::w4a16) {
        const int step = column % kBlockColumns / kStepColumns, t = column % kStepColumns / 8, g = row % 8;
        const int half = row % kTileRows / 8;
        unsigned char* block =
            a.to + (static_cast<size_t>(row / kTileRows) * blocks + column / kBlockColumns) *
                       block_bytes(Kind, a.f32_scales);
        uint32_t word = 0x88888888u;
        if (present > 0)
            word = interleave_nibbles(reinterpret_cast<const uint32_t*>(
                a.data)[static_cast<size_t>(local) * (a.in / 8) + column / 8]);
        *reinterpret_cast<uint32_t*>(block + (4 * g + t) * 16 + (step * 2 + half) * 4) = word;
        if (t == 0) {
            const size_t from = static_cast<size_t>(local) * (a.in / kGroupSize) + column / kGroupSize;
            const int at = g * 4 + step * 2 + half;
            if (a.f32_scales) {
                const float scale = present > 0 ? reinterpret_cast<const float*>(a.scales)[from] : 0.0f;
                bad = !finite(scale * 8.0f);
                reinterpret_cast<float*>(block + kInt4BlockBytes)[at] = scale;
            } else {
                const uint16_t scale = present > 0 ? reinterpret_cast<const uint16_t*>(a.scales)[from] : 0;
                bad = !finite(widen_bf16(scale) * 8.0f);
                reinterpret_cast<uint16_t*>(block + kInt4BlockBytes)[at] = scale;
            }
        }
    } else if constexpr (Kind == WeightKind::bf16) {
        const uint16_t* from =
            reinterpret_cast<const uint16_t*>(a.data) + static_cast<size_t>(local) * a.in + column;
        uint16_t* to = reinterpret_cast<uint16_t*>(a.to + element_offset(Kind, blocks, row, column));
        for (int j = 0; j < 8; ++j) {
            to[j] = j < present ? from[j] : 0;
            bad |= !finite(widen_bf16(to[j]));
        }
    } else {
        const float* from =
            reinterpret_cast<const float*>(a.data) + static_cast<size_t>(local) * a.in + column;
        for (int j = 0; j < 8; ++j) {
            const float v = j < present ? from[j] : 0.0f;
            *reinterpret_cast<float*>(a.to + element_offset(Kind, blocks, row, column + j)) = v;
            bad |= !finite(v);
        }
    }
    if (bad) atomicMin(a.bad_row, row);
}

}  // namespace

void launch_repack(const GemmLaunch& l, WeightKind kind, const RepackArgs& args) {
    const long long threads = static_cast<long long>((args.rows + kTileRows - 1) / kTileRows * kTileRows) *
                              column_blocks(args.in) * 8;
    const Launch as{l.stream, l.device, l.name,
                    dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), kThreads};
    switch (kind) {
        case WeightKind::f32:
            return launch<repack<WeightKind::f32>>(as, args);
        case WeightKind::bf16:
            return launch<repack<WeightKind::bf16>>(as, args);
        case WeightKind::w4a16:
            return launch<repack<WeightKind::w4a16>>(as, args);
    }
}

}  // namespace kdt::cuda
