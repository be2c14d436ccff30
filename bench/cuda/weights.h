// Random weights of a shape, and enough of them that no replay finds its bytes in the L2.
#pragma once

#include <vector>

#include "bench.h"

namespace kdt::bench {

// A matrix of one random row tile over and over: content does not matter to the time, but zeros would.
struct HostWeight {
    HostWeight(WeightKind kind, int out, int in);  // bf16 or w4a16
    HostWeight(const HostWeight&) = delete;
    HostWeight& operator=(const HostWeight&) = delete;

    HostMatrix host;  // of the bytes below

  private:
    std::vector<uint8_t> data_, scales_;
};

// Of a matrix, scales included.
double bytes_of(WeightKind kind, int out, int in);

// Copies of one matrix, several times any L2 together.
std::vector<Weight> rotated(Bench& bench, WeightKind kind, int out, int in);

}  // namespace kdt::bench
