// How a matrix lies in device memory: one layout for every architecture, chosen so that a warp streams its
// weights with 16-byte loads that land in mma.sync's fragment order. Pure arithmetic, used on host and device
// alike.
//
// A matrix [out, in] is cut into blocks of 16 rows x 64 columns, padded with zero weights at the edges; the
// blocks of one row tile lie one after another along K. Inside a block, lane l = 4 g + t of a warp (g 0..7, t
// 0..3) owns rows g and g + 8 and, of every 32 columns, columns 8 t .. 8 t + 7. Two mma steps of K = 16
// consume 32 columns: the first takes each lane's columns 0..3 of its 8, the second columns 4..7. Activations
// are read under the same permutation of K, so the products pair up as they should (docs/kernels/gemm.md).
//
//   f32    4096 bytes  [step of 32 columns][half: rows g, g + 8][columns 0..3, 4..7][lane] 4 floats
//   bf16   2048 bytes  [step][half][lane] 8 values
//   w4a16   512 bytes  [lane][step, half] one word of 8 nibbles, then scales [g][step, half]: 64 bytes of
//   bf16 or
//                      128 of f32. Nibble of column 2 i at bit 4 i, of column 2 i + 1 at bit 16 + 4 i.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backend/backend.h"

#ifdef __CUDACC__
#define KDT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define KDT_HOST_DEVICE inline
#endif

namespace kdt::cuda {

inline constexpr int kTileRows = 16;
inline constexpr int kBlockColumns = 64;
inline constexpr int kStepColumns = 32;
inline constexpr int kInt4BlockBytes = 512;

KDT_HOST_DEVICE constexpr int block_bytes(WeightKind kind, bool f32_scales) {
    return kind == WeightKind::f32    ? 4096
           : kind == WeightKind::bf16 ? 2048
                                      : kInt4BlockBytes + (f32_scales ? 128 : 64);
}

KDT_HOST_DEVICE constexpr int row_tiles(int out) {
    return (out + kTileRows - 1) / kTileRows;
}

KDT_HOST_DEVICE constexpr int column_blocks(int in) {
    return (in + kBlockColumns - 1) / kBlockColumns;
}

KDT_HOST_DEVICE constexpr size_t matrix_bytes(WeightKind kind, bool f32_scales, int out, int in) {
    return static_cast<size_t>(row_tiles(out)) * column_blocks(in) * block_bytes(kind, f32_scales);
}

// Byte offset of element (row, column) inside an f32 or bf16 matrix.
KDT_HOST_DEVICE size_t element_offset(WeightKind kind, int blocks_per_row, int row, int column) {
    const int g = row % 8, half = row % kTileRows / 8;
    const int step = column % kBlockColumns / kStepColumns, t = column % kStepColumns / 8, j = column % 8;
    const int lane = 4 * g + t;
    const size_t block = static_cast<size_t>(row / kTileRows) * blocks_per_row + column / kBlockColumns;
    if (kind == WeightKind::f32)
        return block * 4096 + ((step * 2 + half) * 2 + j / 4) * 512 + lane * 16 + j % 4 * 4;
    return block * 2048 + (step * 2 + half) * 512 + lane * 16 + j * 2;
}

// The word of a w4a16 block that holds columns 8 t .. 8 t + 7 of a step, nibbles in device order, from the
// file's word (nibble of column j at bit 4 j).
KDT_HOST_DEVICE uint32_t interleave_nibbles(uint32_t word) {
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= (word >> (8 * i) & 0xF) << (4 * i);
        result |= (word >> (8 * i + 4) & 0xF) << (16 + 4 * i);
    }
    return result;
}

KDT_HOST_DEVICE uint32_t nibble(uint32_t interleaved, int column) {
    return interleaved >> ((column % 2) * 16 + column / 2 * 4) & 0xF;
}

}  // namespace kdt::cuda
