// Rotary position embedding: YaRN frequencies (Peng et al., arXiv 2309.00071, section 3) and the table of
// cosines and sines.
#pragma once

#include <vector>

#include "model/config.h"

namespace kdt {

// [qk_rope_head_dim / 2] angles per position, float64 arithmetic rounded to float32.
std::vector<float> rope_inverse_frequencies(const ModelConfig& config);

// Factor on cos and sin: m(mscale) / m(mscale_all_dim), 1 for every released model. Not the softmax
// correction.
double rope_amplitude(const ModelConfig& config);

// cos and sin for positions 0 .. positions - 1, each [positions, qk_rope_head_dim / 2].
void rope_table(const ModelConfig& config, int positions, std::vector<float>& cos, std::vector<float>& sin);

}  // namespace kdt
