// Rotary positions (Su et al., arXiv 2104.09864) with YaRN (Peng et al., arXiv 2309.00071): frequencies and
// the table of angles, for the target and for draft models.
#pragma once

#include <vector>

namespace kdt {

struct Rotary {
    int dim = 0;  // values that turn: dim / 2 pairs
    double theta = 0.0;
    double factor = 0.0;  // YaRN; 0: plain, and the three below are 0 too
    double original_positions = 0.0;
    double beta_fast = 0.0, beta_slow = 0.0;
    double amplitude = 1.0;  // of cos and sin
};

// YaRN's m(mscale) = 0.1 * mscale * ln(factor) + 1; 1 for a factor that stretches nothing.
double yarn_magnitude(double factor, double mscale);

// Radians per position of each pair, dim / 2 of them: computed in float64, rounded to float32.
std::vector<float> rotary_frequencies(const Rotary& rotary);

// cos and sin [positions, dim / 2], times the amplitude, in float32. The angle is a float32 product of
// position and frequency, as the reference implementations compute it; its cos and sin are float64.
void rotary_table(const Rotary& rotary, int positions, std::vector<float>& cos, std::vector<float>& sin);

}  // namespace kdt
