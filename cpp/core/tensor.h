// A view of a dense, row-major tensor in host memory. It owns nothing.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kdt {

struct TensorView {
    DType dtype = DType::f32;
    std::vector<int64_t> shape;  // empty: a scalar
    const void* data = nullptr;
    size_t bytes = 0;  // product(shape) * dtype_size(dtype)

    int64_t elements() const {
        int64_t n = 1;
        for (int64_t d : shape) n *= d;
        return n;
    }
};

// "[64, 128]", for messages.
inline std::string shape_text(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

}  // namespace kdt
