#include "engine/cost_table.h"

#include <algorithm>

namespace kdt {

namespace {

constexpr double kScaleBlend = 0.05;   // weight of one observation in the whole cost table
constexpr double kEntryBlend = 0.1;    // and in its own entry
constexpr double kUnknownSlope = 0.5;  // of a plain round per node, where only that is known

}  // namespace

size_t CostTable::index(int nodes) {
    return std::lower_bound(kSizes.begin(), kSizes.end() - 1, nodes) - kSizes.begin();
}

void CostTable::measure(const std::function<double(int)>& verify, double limit,
                        const std::function<double(int)>& prepare) {
    constexpr std::array<int, kSizes.size()> order = {0, 7, 2, 31, 15, 4, 1, 64, 11, 8, 3, 16, 5, 23, 32, 47};
    double spent = 0.0;
    // The best of up to three: other work on the machine only ever adds time.
    for (int pass = 0; pass < 3; ++pass)
        for (const int nodes : order) {
            const size_t i = index(nodes);
            if ((pass > 0 && !known_[i]) || spent + seconds_[i] > limit) continue;
            if (pass == 0 && prepare) {
                spent += prepare(nodes);
                if (spent + seconds_[i] > limit) continue;
            }
            const double seconds = verify(nodes);
            spent += seconds;
            raw_[i] = known_[i] ? std::min(raw_[i], seconds) : seconds;
            known_[i] = true;
            fill();
        }
    measured_ = true;
}

void CostTable::observe(int nodes, double seconds) {
    const size_t i = index(nodes);
    if (kSizes[i] != nodes) return;
    if (!known_[i]) {
        raw_[i] = seconds;
        known_[i] = true;
    } else {
        const double change = std::clamp(seconds / raw_[i], 0.5, 2.0) - 1.0;
        for (double& s : raw_) s *= 1.0 + kScaleBlend * change;
        raw_[i] *= 1.0 + kEntryBlend * change;
    }
    fill();
}

void CostTable::fill() {
    const auto line = [this](size_t a, size_t b, size_t i) {
        return raw_[a] + (raw_[b] - raw_[a]) * (kSizes[i] - kSizes[a]) / (kSizes[b] - kSizes[a]);
    };
    size_t last = kSizes.size(), before = kSizes.size();  // the known entries to the left, none at first
    for (size_t i = 0; i < kSizes.size(); ++i) {
        if (known_[i]) {
            before = last;
            last = i;
            seconds_[i] = raw_[i];
            continue;
        }
        const size_t next =
            std::find(known_.begin() + i, known_.end(), true) - known_.begin();  // to the right
        if (last == kSizes.size())
            seconds_[i] = next < kSizes.size() ? raw_[next] : 0.0;
        else if (next < kSizes.size())
            seconds_[i] = line(last, next, i);
        else if (before < kSizes.size())
            seconds_[i] = line(before, last, i);
        else
            seconds_[i] = raw_[last] * (1.0 + kUnknownSlope * (kSizes[i] - kSizes[last]));
    }
    for (size_t i = 1; i < seconds_.size(); ++i) seconds_[i] = std::max(seconds_[i], seconds_[i - 1]);
}

}  // namespace kdt
