#include "model/rope.h"

#include <algorithm>
#include <cmath>

namespace kdt {

namespace {

// The pair index at which `turns` full rotations fit into the original context.
double correction(const ModelConfig& c, double turns) {
    return c.qk_rope_head_dim * std::log(c.rope_original_max_position_embeddings / (turns * 2.0 * M_PI)) /
           (2.0 * std::log(c.rope_theta));
}

double magnitude(double factor, double mscale) {
    return factor <= 1.0 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const ModelConfig& c) {
    const int d = c.qk_rope_head_dim;
    double low = 0.0, high = 0.0;
    if (c.rope_factor > 0.0) {
        low = std::max(std::floor(correction(c, c.rope_beta_fast)), 0.0);
        high = std::min(std::ceil(correction(c, c.rope_beta_slow)), d - 1.0);
        if (low == high) high += 0.001;
    }
    std::vector<float> inverse(d / 2);
    for (int i = 0; i < d / 2; ++i) {
        const double extrapolated = 1.0 / std::pow(c.rope_theta, 2.0 * i / d);
        if (c.rope_factor == 0.0) {
            inverse[i] = static_cast<float>(extrapolated);
            continue;
        }
        const double interpolated = extrapolated / c.rope_factor;
        const double ramp = std::clamp((i - low) / (high - low), 0.0, 1.0);
        inverse[i] = static_cast<float>(interpolated * ramp + extrapolated * (1.0 - ramp));
    }
    return inverse;
}

double rope_amplitude(const ModelConfig& c) {
    if (c.rope_factor == 0.0) return 1.0;
    if (c.rope_mscale != 0.0 && c.rope_mscale_all_dim != 0.0)
        return magnitude(c.rope_factor, c.rope_mscale) / magnitude(c.rope_factor, c.rope_mscale_all_dim);
    return magnitude(c.rope_factor, 1.0);
}

void rope_table(const ModelConfig& c, int positions, std::vector<float>& cos, std::vector<float>& sin) {
    const std::vector<float> inverse = rope_inverse_frequencies(c);
    const double amplitude = rope_amplitude(c);
    const size_t half = inverse.size();
    cos.resize(positions * half);
    sin.resize(positions * half);
    for (int p = 0; p < positions; ++p) {
        for (size_t i = 0; i < half; ++i) {
            // The product is float32 as in the reference implementations: checkpoints were trained with these
            // angles.
            const float angle = static_cast<float>(p) * inverse[i];
            cos[p * half + i] = static_cast<float>(std::cos(static_cast<double>(angle)) * amplitude);
            sin[p * half + i] = static_cast<float>(std::sin(static_cast<double>(angle)) * amplitude);
        }
    }
}

}  // namespace kdt
