// Quantised weights as files store them -> floating point, on the host, while a model loads. The value of a
// stored weight is code * scale; docs/numerics.md says when it is rounded, and to what.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/tensor.h"

namespace kdt {

// What becomes of code * scale.
enum class Rounding : uint8_t {
    exact,  // kept: rounded once to float32 at most
    bf16,   // rounded to bf16 (nearest, ties to even), as libraries do that dequantise to a 16-bit matrix
};

// A matrix in floating point, f32 or bf16.
struct FloatMatrix {
    DType dtype = DType::f32;
    std::vector<float> f32;
    std::vector<uint16_t> bf16;

    const void* data() const {
        return dtype == DType::f32 ? static_cast<const void*>(f32.data()) : bf16.data();
    }
    TensorView view(std::vector<int64_t> shape) const;
};

// INT4: qw i32 [out, in / 8], sc f32 or bf16 [out, in / 32]; shapes are the caller's to check. Throws
// not_finite naming `name` for a scale that is not finite.
FloatMatrix dequantize_w4a16(const TensorView& qw, const TensorView& sc, Rounding rounding,
                             const std::string& name);

// fp8 e4m3 (one byte a weight, no infinities, NaN 0x7F and 0xFF): codes u8 [out, in], scales f32
// [ceil(out / 128), ceil(in / 128)], one per block of 128 x 128. `exact` yields bf16 where no product loses a
// bit in it (scales that are powers of two), else f32. A NaN code stays a NaN, which backends refuse.
FloatMatrix dequantize_fp8(const TensorView& codes, const TensorView& scales, Rounding rounding,
                           const std::string& name);

inline constexpr int kFp8Block = 128;

}  // namespace kdt
