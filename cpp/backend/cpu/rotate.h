// Rotary positions on the CPU: one function for latent and for grouped-query attention.
#pragma once

#include <cmath>

#include "backend/backend.h"
#include "core/error.h"

namespace kdt::cpu {

// Rotates `rope` values at angle row `position` of the table; the pairs stay where they are stored. y may be
// x.
inline void rotate(const RopeTable& table, int position, const float* x, float* y) {
    const int half = table.rope / 2;
    const float* cos = table.cos + static_cast<ptrdiff_t>(position) * half;
    const float* sin = table.sin + static_cast<ptrdiff_t>(position) * half;
    for (int j = 0; j < half; ++j) {
        const int a = table.interleaved ? 2 * j : j;
        const int b = table.interleaved ? 2 * j + 1 : j + half;
        const float x0 = x[a], x1 = x[b];
        y[a] = std::fma(x0, cos[j], -(x1 * sin[j]));
        y[b] = std::fma(x1, cos[j], x0 * sin[j]);
    }
}

inline void check_positions(const int32_t* position, int rows, const RopeTable& table) {
    for (int i = 0; i < rows; ++i)
        if (position[i] < 0 || position[i] >= table.positions)
            fail(ErrorCode::invalid_argument,
                 "row %d stands at position %d; the angle table has %d positions", i, position[i],
                 table.positions);
}

}  // namespace kdt::cpu
