// Small arrays that cross between host and device together: laid out in one buffer, moved by one copy.
#pragma once

#include <cstring>
#include <vector>

#include "backend/backend.h"

namespace kdt {

class Staging {
  public:
    // Reserves n values; returns their offset. Before `allocate`.
    template <class T>
    size_t add(size_t n) {
        const size_t offset = (host_.size() + kAlignment - 1) / kAlignment * kAlignment;
        host_.resize(offset + n * sizeof(T), 0);
        return offset;
    }

    void allocate(Backend& backend, const char* what) {
        backend_ = &backend;
        device_ = Buffer(backend, host_.size(), what);
    }

    template <class T>
    T* device(size_t offset) const {
        return reinterpret_cast<T*>(device_.as<char>() + offset);
    }
    template <class T>
    T* host(size_t offset) {
        return reinterpret_cast<T*>(host_.data() + offset);
    }
    template <class T>
    void set(size_t offset, const std::vector<T>& values) {
        if (!values.empty()) std::memcpy(host_.data() + offset, values.data(), values.size() * sizeof(T));
    }

    void upload() { backend_->upload(device_.as<char>(), host_.data(), host_.size()); }
    void download() { backend_->download(host_.data(), device_.as<char>(), host_.size()); }

  private:
    static constexpr size_t kAlignment = 16;
    Backend* backend_ = nullptr;
    std::vector<char> host_;
    Buffer device_;
};

}  // namespace kdt
