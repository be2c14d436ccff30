#include "core/rotary.h"

#include <algorithm>
#include <cmath>

namespace kdt {

namespace {

// The pair index at which `turns` full rotations fit into the original context.
double correction(const Rotary& r, double turns) {
    return r.dim * std::log(r.original_positions / (turns * 2.0 * M_PI)) / (2.0 * std::log(r.theta));
}

}  // namespace

double yarn_magnitude(double factor, double mscale) {
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

std::vector<float> rotary_frequencies(const Rotary& r) {
    const int d = r.dim;
    double low = 0.0, high = 0.0;
    if (r.factor > 0.0) {
        low = std::max(std::floor(correction(r, r.beta_fast)), 0.0);
        high = std::min(std::ceil(correction(r, r.beta_slow)), d - 1.0);
        if (low == high) high += 0.001;
    }
    std::vector<float> inverse(d / 2);
    for (int i = 0; i < d / 2; ++i) {
        const double extrapolated = 1.0 / std::pow(r.theta, 2.0 * i / d);
        if (r.factor == 0.0) {
            inverse[i] = static_cast<float>(extrapolated);
            continue;
        }
        const double interpolated = extrapolated / r.factor;
        const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
        inverse[i] = static_cast<float>(interpolated * ramp + extrapolated * (1.0 - ramp));
    }
    return inverse;
}

void rotary_table(const Rotary& r, int positions, std::vector<float>& cos, std::vector<float>& sin) {
    const std::vector<float> inverse = rotary_frequencies(r);
    const size_t half = inverse.size();
    cos.resize(positions * half);
    sin.resize(positions * half);
    for (int p = 0; p < positions; ++p) {
        for (size_t i = 0; i < half; ++i) {
            const float angle = static_cast<float>(p) * inverse[i];
            cos[p * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)) * r.amplitude);
            sin[p * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)) * r.amplitude);
        }
    }
}

}  // namespace kdt
