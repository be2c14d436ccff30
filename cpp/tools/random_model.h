// Models with random weights in true shapes, for proofs and timings on machines that hold no checkpoint.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace kdt {

// "tiny", "moonlight" (Moonlight-16B-A3B), "k2" (Kimi K2.6, three of its 61 layers).
std::map<std::string, double> shape_fields(const std::string& shape, int layers);

// Routed experts, and with `int4_dense` every other MLP, are INT4 with bf16 scales; the rest is bf16. The
// same seed gives the same weights on every device.
std::shared_ptr<const Engine> random_engine(const std::map<std::string, double>& fields,
                                            const DeviceOptions& device, uint64_t seed);

// SplitMix64 (Steele, Lea, Flood 2014).
class SplitMix {
  public:
    explicit SplitMix(uint64_t seed) : state_(seed) {}
    uint64_t next() {
        uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
        z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
        return z ^ (z >> 31);
    }

  private:
    uint64_t state_;
};

}  // namespace kdt
