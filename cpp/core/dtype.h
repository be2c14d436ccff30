// Element types of files and tensors. The numeric values are those of the KDTR v1 file format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace kdt {

enum class DType : uint8_t { f64 = 1, f32 = 2, f16 = 3, bf16 = 4, i64 = 5, i32 = 6, u8 = 7 };

inline size_t dtype_size(DType dtype) {
    switch (dtype) {
        case DType::f64:
        case DType::i64:
            return 8;
        case DType::f32:
        case DType::i32:
            return 4;
        case DType::f16:
        case DType::bf16:
            return 2;
        case DType::u8:
            return 1;
    }
    return 0;
}

inline const char* dtype_name(DType dtype) {
    switch (dtype) {
        case DType::f64:
            return "f64";
        case DType::f32:
            return "f32";
        case DType::f16:
            return "f16";
        case DType::bf16:
            return "bf16";
        case DType::i64:
            return "i64";
        case DType::i32:
            return "i32";
        case DType::u8:
            return "u8";
    }
    return "?";
}

inline float widen_bf16(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &word, sizeof value);
    return value;
}

// Raw f32 or bf16 values as floats.
inline std::vector<float> widen(const std::vector<char>& raw, DType dtype) {
    std::vector<float> out(raw.size() / dtype_size(dtype));
    if (dtype == DType::f32) {
        std::memcpy(out.data(), raw.data(), raw.size());
        return out;
    }
    for (size_t i = 0; i < out.size(); ++i) {
        uint16_t bits;
        std::memcpy(&bits, raw.data() + i * sizeof bits, sizeof bits);
        out[i] = widen_bf16(bits);
    }
    return out;
}

}  // namespace kdt
