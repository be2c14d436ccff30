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
        const size_t offset = (layout_ + kAlignment - 1) / kAlignment * kAlignment;
        layout_ = offset + n * sizeof(T);
        return offset;
    }

    // Fixes the layout. `page_locked`: copies cross fastest, and an upload reads the host's side when its
    // turn comes: nobody may change that between an upload and the next synchronize.
    void allocate(Backend& backend, const char* what, bool page_locked = false) {
        backend_ = &backend;
        device_ = Buffer(backend, layout_, what);
        if (page_locked)
            locked_ = HostBuffer(backend, layout_, what);
        else
            plain_.resize(layout_);
        host_ = page_locked ? locked_.data() : plain_.data();
        std::memset(host_, 0, layout_);
    }

    template <class T>
    T* device(size_t offset) const {
        return reinterpret_cast<T*>(device_.as<char>() + offset);
    }
    template <class T>
    T* host(size_t offset) {
        return reinterpret_cast<T*>(host_ + offset);
    }
    template <class T>
    void set(size_t offset, const std::vector<T>& values) {
        if (!values.empty()) std::memcpy(host_ + offset, values.data(), values.size() * sizeof(T));
    }

    void upload() { backend_->upload(device_.as<char>(), host_, layout_); }
    void download() { backend_->download(host_, device_.as<char>(), layout_); }

  private:
    static constexpr size_t kAlignment = 16;
    Backend* backend_ = nullptr;
    size_t layout_ = 0;  // bytes
    std::vector<char> plain_;
    HostBuffer locked_;
    char* host_ = nullptr;
    Buffer device_;
};

}  // namespace kdt
