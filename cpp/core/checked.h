// Arithmetic on numbers that came from a file: a result that does not fit is reported, never wrapped.
#pragma once

#include <cstdint>

namespace kdt {

[[nodiscard]] inline bool checked_add(uint64_t a, uint64_t b, uint64_t& sum) {
    return !__builtin_add_overflow(a, b, &sum);
}

[[nodiscard]] inline bool checked_mul(uint64_t a, uint64_t b, uint64_t& product) {
    return !__builtin_mul_overflow(a, b, &product);
}

// The least multiple of `alignment` (a power of two) that is at least `value`.
[[nodiscard]] inline bool checked_align_up(uint64_t value, uint64_t alignment, uint64_t& aligned) {
    if (!checked_add(value, alignment - 1, aligned)) return false;
    aligned &= ~(alignment - 1);
    return true;
}

}  // namespace kdt
