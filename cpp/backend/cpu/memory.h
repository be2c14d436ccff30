// Aligned memory with honest refusals.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace kdt::cpu {

// 64-byte aligned, large blocks on huge pages where the system has them. Throws `out_of_memory` with the
// numbers where the system (or the container's limit) has not got that much left. With KDTREE_POISON=1 in the
// environment, fresh memory is filled with 0xFF bytes: NaN to every reader.
void* allocate(size_t bytes, const char* what);

// Bytes that can be had without swapping; SIZE_MAX where the system does not say.
size_t available_memory();

struct Free {
    void operator()(void* pointer) const;
};

// An array of trivial values.
template <class T>
class Array {
  public:
    Array() = default;
    Array(size_t count, const char* what)
        : data_(static_cast<T*>(allocate(count * sizeof(T), what))), size_(count) {}
    T* data() const { return data_.get(); }
    T& operator[](size_t i) const { return data_.get()[i]; }
    size_t size() const { return size_; }

  private:
    std::unique_ptr<T, Free> data_;
    size_t size_ = 0;
};

}  // namespace kdt::cpu
