// Arrays between numpy and the engine, without copies or casts.
#pragma once

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <initializer_list>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"

namespace kdt::bind_support {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
template <class T, size_t N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

inline TensorView view(const AnyArray& array, const std::string& name) {
    TensorView v;
    const nb::dlpack::dtype t = array.dtype();
    if (t == nb::dtype<float>())
        v.dtype = DType::f32;
    else if (t == nb::dtype<uint16_t>())
        v.dtype = DType::bf16;
    else if (t == nb::dtype<int32_t>())
        v.dtype = DType::i32;
    else if (t == nb::dtype<uint8_t>())
        v.dtype = DType::u8;
    else
        fail(ErrorCode::bad_model,
             "tensor %s: the array must be float32, uint16 (bf16 bits), int32 or uint8 (fp8)", name.c_str());
    for (size_t i = 0; i < array.ndim(); ++i) v.shape.push_back(static_cast<int64_t>(array.shape(i)));
    v.data = array.data();
    v.bytes = array.nbytes();
    return v;
}

// Hands a vector to numpy without a copy.
template <class T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T>&& values, std::initializer_list<size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::ndarray<nb::numpy, T>(owned->data(), shape, owner);
}

}  // namespace kdt::bind_support
