#include "model/dequantize.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "core/error.h"
#include "core/limits.h"

namespace kdt {

namespace {

// Finite values and infinities; a NaN whose payload does not end in ones stays a NaN.
uint16_t round_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

// The scales as float32, all of them finite.
std::vector<float> finite_scales(const TensorView& scales, const std::string& name) {
    std::vector<float> values(static_cast<size_t>(scales.elements()));
    if (scales.dtype == DType::f32) {
        std::memcpy(values.data(), scales.data, values.size() * sizeof(float));
    } else {
        const auto* from = static_cast<const unsigned char*>(scales.data);
        for (size_t i = 0; i < values.size(); ++i) {
            uint16_t half;
            std::memcpy(&half, from + 2 * i, sizeof half);
            values[i] = widen_bf16(half);
        }
    }
    for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
            fail(ErrorCode::not_finite, "%s has a scale that is %g in row %lld of its scales", name.c_str(),
                 static_cast<double>(values[i]),
                 static_cast<long long>(static_cast<int64_t>(i) / scales.shape[1]));
    return values;
}

// The 256 values of e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa; exponent 0 is subnormal, all
// ones is NaN.
std::array<float, 256> e4m3_values() {
    std::array<float, 256> values{};
    for (int code = 0; code < 256; ++code) {
        const int exponent = code >> 3 & 15, mantissa = code & 7;
        float v = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
        if ((code & 0x7F) == 0x7F) v = std::nanf("");
        values[static_cast<size_t>(code)] = code & 0x80 ? -v : v;
    }
    return values;
}

bool all_fit_bf16(const std::vector<float>& values) {
    uint32_t low = 0;
    for (const float v : values) {
        uint32_t bits;
        std::memcpy(&bits, &v, sizeof bits);
        low |= bits & 0xFFFFu;
    }
    return low == 0;
}

// Consumes the f32 values of `m` where bf16 is asked for, or loses nothing.
void narrow(FloatMatrix& m) {
    m.bf16.resize(m.f32.size());
    for (size_t i = 0; i < m.f32.size(); ++i) m.bf16[i] = round_bf16(m.f32[i]);
    m.f32 = {};
    m.dtype = DType::bf16;
}

}  // namespace

TensorView FloatMatrix::view(std::vector<int64_t> shape) const {
    TensorView v;
    v.dtype = dtype;
    v.shape = std::move(shape);
    v.data = data();
    v.bytes = static_cast<size_t>(v.elements()) * dtype_size(dtype);
    return v;
}

FloatMatrix dequantize_w4a16(const TensorView& qw, const TensorView& sc, Rounding rounding,
                             const std::string& name) {
    constexpr int kWords = kGroupSize / 8;
    const std::vector<float> scales = finite_scales(sc, name);
    const auto* words = static_cast<const unsigned char*>(qw.data);
    FloatMatrix m;
    m.f32.resize(scales.size() * kGroupSize);
    for (size_t g = 0; g < scales.size(); ++g) {
        uint32_t group[kWords];
        std::memcpy(group, words + g * sizeof group, sizeof group);
        float* to = m.f32.data() + g * kGroupSize;
        for (int i = 0; i < kGroupSize; ++i) {
            const int code = static_cast<int>(group[i / 8] >> (4 * (i % 8)) & 15u) - 8;
            to[i] = static_cast<float>(code) * scales[g];
        }
    }
    if (rounding == Rounding::bf16) narrow(m);
    return m;
}

FloatMatrix dequantize_fp8(const TensorView& codes, const TensorView& scales, Rounding rounding,
                           const std::string& name) {
    static const std::array<float, 256> kValues = e4m3_values();
    const std::vector<float> scale = finite_scales(scales, name);
    const auto out = static_cast<size_t>(codes.shape[0]), in = static_cast<size_t>(codes.shape[1]);
    const auto blocks = static_cast<size_t>(scales.shape[1]);
    const auto* from = static_cast<const uint8_t*>(codes.data);
    FloatMatrix m;
    m.f32.resize(out * in);
    for (size_t r = 0; r < out; ++r) {
        for (size_t b = 0; b < blocks; ++b) {
            const float s = scale[r / kFp8Block * blocks + b];
            const size_t end = std::min(in, (b + 1) * kFp8Block);
            for (size_t c = b * kFp8Block; c < end; ++c) m.f32[r * in + c] = kValues[from[r * in + c]] * s;
        }
    }
    if (rounding == Rounding::bf16 || all_fit_bf16(m.f32)) narrow(m);
    return m;
}

}  // namespace kdt
