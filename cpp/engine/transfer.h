// Values between the host and a backend's memory.
#pragma once

#include <span>
#include <vector>

#include "backend/backend.h"

namespace kdt {

template <class T>
void put(Backend& b, const Buffer& to, std::span<const T> values) {
    if (!values.empty()) b.upload(to.as<T>(), values.data(), values.size_bytes());
}

template <class T>
void put(Backend& b, const Buffer& to, T value) {
    b.upload(to.as<T>(), &value, sizeof value);
}

template <class T>
std::vector<T> get(Backend& b, const T* from, size_t n) {
    std::vector<T> values(n);
    if (n > 0) b.download(values.data(), from, n * sizeof(T));
    return values;
}

}  // namespace kdt
