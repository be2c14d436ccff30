#include "model/rope.h"

#include "core/rotary.h"

namespace kdt {

namespace {

Rotary rotary(const ModelConfig& c) {
    return {c.qk_rope_head_dim, c.rope_theta,     c.rope_factor,    c.rope_original_max_position_embeddings,
            c.rope_beta_fast,   c.rope_beta_slow, rope_amplitude(c)};
}

}  // namespace

std::vector<float> rope_inverse_frequencies(const ModelConfig& c) {
    return rotary_frequencies(rotary(c));
}

double rope_amplitude(const ModelConfig& c) {
    if (c.rope_factor == 0.0) return 1.0;
    if (c.rope_mscale != 0.0 && c.rope_mscale_all_dim != 0.0)
        return yarn_magnitude(c.rope_factor, c.rope_mscale) /
               yarn_magnitude(c.rope_factor, c.rope_mscale_all_dim);
    return yarn_magnitude(c.rope_factor, 1.0);
}

void rope_table(const ModelConfig& c, int positions, std::vector<float>& cos, std::vector<float>& sin) {
    rotary_table(rotary(c), positions, cos, sin);
}

}  // namespace kdt
