// What the groups of kdtree-bench-cuda share: timing inside a CUDA graph, device arrays, the record.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"

namespace kdt::bench {

uint64_t random_bits();
float random_unit();  // in [-1, 1)

class Bench {
  private:
    struct Clock;  // the CUDA backend with events on its stream
    std::unique_ptr<Clock> clock_;

  public:
    explicit Bench(int replays);  // on GPU 0
    ~Bench();
    Bench(const Bench&) = delete;
    Bench& operator=(const Bench&) = delete;

    // Microseconds of one of the `n` calls of op(0 .. n - 1): the median over replays of a graph of all.
    double time(int n, const std::function<void(int)>& op);

    // Prints a result and keeps it for the record. `bytes`: what must come from memory once, 0 where the L2
    // may hold it; `flops`: operations of the products, 0: not stated.
    void report(const std::string& name, int rows, double microseconds, double bytes, double flops = 0.0,
                const std::string& note = "");
    // All results as one JSON object, beside the device, the date and the device's read rate.
    void write_record(const std::string& path);

    // Device arrays, until `clear`.
    template <class T>
    T* array(const std::vector<T>& values) {
        buffers_.emplace_back(b, values.size() * sizeof(T), "a benchmark");
        T* data = buffers_.back().template as<T>();
        b.upload(data, values.data(), values.size() * sizeof(T));
        b.synchronize();
        return data;
    }
    float* floats(int rows, int width);  // random
    int32_t* ints(int n, int32_t value = 0) {
        return array(std::vector<int32_t>(static_cast<size_t>(n), value));
    }
    int32_t* scalar(int value) { return ints(1, value); }
    TreeArrays tree();  // of no node
    RowBatch tree_rows();
    void clear() { buffers_.clear(); }

    Backend& b;

  private:
    struct Result {
        std::string name;
        int rows;
        double microseconds, floor, bytes, flops;
        std::string note;
    };

    int replays_;
    std::vector<Buffer> buffers_;
    std::vector<Result> results_;
};

}  // namespace kdt::bench
