#include "weights.h"

#include <algorithm>
#include <cstring>

namespace kdt::bench {

namespace {

constexpr size_t kRotatedBytes = size_t{400} << 20;  // several times any L2

// The upper half of a float32: what is left is bfloat16.
uint16_t truncated(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return static_cast<uint16_t>(bits >> 16);
}

}  // namespace

HostWeight::HostWeight(WeightKind kind, int out, int in) {
    const size_t n = static_cast<size_t>(out) * static_cast<size_t>(in);
    const bool packed = kind == WeightKind::w4a16;
    data_.resize(packed ? n / 2 : n * 2);
    std::vector<uint16_t> pool(1 << 16);
    for (uint16_t& v : pool)
        v = packed ? static_cast<uint16_t>(random_bits()) : truncated(random_unit() * 0.05f);
    for (size_t i = 0; i < data_.size() / 2; ++i)
        std::memcpy(data_.data() + 2 * i, &pool[(i * 7919 + i / 65536) % pool.size()], 2);
    host.kind = kind;
    host.out = out;
    host.in = in;
    host.data = data_.data();
    if (!packed) return;
    scales_.resize(n / kGroupSize * 2);
    for (size_t i = 0; i < n / kGroupSize; ++i) {
        const uint16_t scale = truncated(0.002f + 0.001f * random_unit());
        std::memcpy(scales_.data() + 2 * i, &scale, 2);
    }
    host.scales = scales_.data();
    host.scale_dtype = DType::bf16;
}

double bytes_of(WeightKind kind, int out, int in) {
    const double n = static_cast<double>(out) * in;
    return kind == WeightKind::w4a16 ? n / 2 + n / 16 : 2 * n;
}

std::vector<Weight> rotated(Bench& bench, WeightKind kind, int out, int in) {
    const HostWeight source(kind, out, in);
    const int sets =
        std::clamp(static_cast<int>(static_cast<double>(kRotatedBytes) / bytes_of(kind, out, in)), 3, 64);
    std::vector<Weight> list;
    for (int i = 0; i < sets; ++i) list.push_back(bench.b.upload_matrix(source.host, "w"));
    return list;
}

}  // namespace kdt::bench
