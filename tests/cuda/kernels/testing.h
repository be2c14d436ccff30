// A small test program's needs: cases, random numbers, device arrays, comparisons. The same sources run on a
// GPU and, at reduced shapes, on the emulator.
#pragma once

#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/error.h"

namespace kdt::testing {

struct Options {
    bool small = false;        // reduced shapes: for the emulator and for sanitizers
    std::string filter, only;  // part of a name; a whole name
};
const Options& options();

// Backends are made once. "bf16" or "f32".
Backend& backend(const std::string& precision);

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};
[[noreturn]] void failed(const char* format, ...) __attribute__((format(printf, 1, 2)));

// Called after each case; what it returns, if anything, is why the case failed.
void set_after_case(std::string (*look)());

// Counts comparisons, so that a case that compared nothing does not pass.
void count_checks(size_t n);

struct Registration {
    Registration(const char* name, void (*run)());
};
#define KDT_CASE(name)                                                        \
    static void name();                                                       \
    static const ::kdt::testing::Registration registered_##name(#name, name); \
    static void name()

class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed) {}
    uint64_t bits();
    int below(int n) { return static_cast<int>(bits() % static_cast<uint64_t>(n)); }
    int between(int low, int high) { return low + below(high - low + 1); }
    double unit() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
    float symmetric() { return static_cast<float>(unit() * 2.0 - 1.0); }
    std::vector<int> permutation(int n);

  private:
    uint64_t state_;
};

// `n` times `symmetric`.
std::vector<float> random_values(Random& random, size_t n);

// Device memory that starts as NaN.
template <class T>
class Device {
  public:
    Device(Backend& b, size_t n) : backend_(&b), n_(n), buffer_(b, n * sizeof(T), "a test") { poison(); }
    Device(Backend& b, const std::vector<T>& values) : Device(b, values.size()) { set(values); }
    void poison() { backend_->fill(buffer_.as<T>(), 0xFF, n_ * sizeof(T)); }
    void set(const std::vector<T>& values) {
        if (!values.empty()) backend_->upload(buffer_.as<T>(), values.data(), values.size() * sizeof(T));
        backend_->synchronize();
    }
    std::vector<T> get() const {
        std::vector<T> values(n_);
        if (n_ > 0) backend_->download(values.data(), buffer_.template as<T>(), n_ * sizeof(T));
        return values;
    }
    T* data() const { return buffer_.template as<T>(); }
    size_t size() const { return n_; }

  private:
    Backend* backend_;
    size_t n_;
    Buffer buffer_;
};

inline Device<int32_t> scalar(Backend& b, size_t value) {
    return Device<int32_t>(b, std::vector<int32_t>{static_cast<int32_t>(value)});
}

template <class T>
void expect_same(const T* got, const T* wanted, size_t n, const std::string& what) {
    count_checks(n);
    for (size_t i = 0; i < n; ++i)
        if (std::memcmp(got + i, wanted + i, sizeof(T)) != 0)
            failed("%s: entry %zu of %zu is %.9g; %.9g was expected, bit for bit", what.c_str(), i, n,
                   static_cast<double>(got[i]), static_cast<double>(wanted[i]));
}

template <class T>
void expect_same(const std::vector<T>& got, const std::vector<T>& wanted, const std::string& what) {
    if (got.size() != wanted.size())
        failed("%s: %zu entries; %zu were expected", what.c_str(), got.size(), wanted.size());
    expect_same(got.data(), wanted.data(), got.size(), what);
}

void expect_near(const std::vector<float>& got, const std::vector<double>& wanted,
                 const std::vector<double>& bound, const std::string& what);

float bf16_round(float x);
uint16_t bf16_bits(float x);
float bf16_value(uint16_t bits);
// Values as a cache in that precision has them in memory.
std::vector<uint8_t> cache_bytes(const std::vector<float>& values, bool bf16);

// A matrix in the form of files, with the values that it stands for.
struct TestMatrix {
    WeightKind kind;
    DType scale_dtype;
    int out, in;
    std::vector<float> f32;
    std::vector<uint16_t> bf16;
    std::vector<uint32_t> words;
    std::vector<float> scales;
    std::vector<uint16_t> scales16;
    std::vector<float> value;  // [out, in]

    HostMatrix host() const;
};
// `integers`: small whole values and scales of one, so that every sum is exact.
TestMatrix random_matrix(Random& random, WeightKind kind, DType scale_dtype, int out, int in,
                         bool integers = false);

// Row counts of the purity tests.
std::vector<int> row_counts();

// Law 1. The op is run for each of `pool` rows alone; then for mixtures of every row count, in random order,
// among neighbours that are NaN or infinite, with capacity beyond the live rows; each row must have the same
// bits again. `run(rows, capacity)`: rows name entries of the pool, or are -1 - k for the k-th kind of
// garbage (0: NaN, 1: infinity, 2: huge); returns each row's output, and checks itself that padding rows were
// left alone.
using RunRows = std::function<std::vector<std::vector<uint8_t>>(const std::vector<int>& rows, int capacity)>;
void check_purity(const std::string& what, Random& random, int pool, const RunRows& run);

// A garbage value of kind k.
float garbage(int kind, Random& random);

// Cuts an output [capacity, width] into rows and checks that rows past `live` still hold what `poison` left.
template <class T>
std::vector<std::vector<uint8_t>> rows_of(const std::vector<T>& all, size_t width, size_t live) {
    for (size_t i = live * width; i < all.size(); ++i) {
        uint8_t bytes[sizeof(T)];
        std::memcpy(bytes, &all[i], sizeof(T));
        for (const uint8_t byte : bytes)
            if (byte != 0xFF) failed("a padding row was written: entry %zu of row %zu", i % width, i / width);
    }
    std::vector<std::vector<uint8_t>> rows(live, std::vector<uint8_t>(width * sizeof(T)));
    for (size_t r = 0; r < live; ++r) std::memcpy(rows[r].data(), all.data() + r * width, width * sizeof(T));
    return rows;
}

// One of them as numbers.
std::vector<float> floats_of(const std::vector<uint8_t>& bytes);

}  // namespace kdt::testing
