#include "engine/budget.h"

#include <algorithm>
#include <cmath>

#include "core/limits.h"

namespace kdt {

namespace {

constexpr double kDecay = 0.95;   // of running sums, per round
constexpr double kBlend = 0.1;    // weight of one observation in a cost entry
constexpr int kWarmUp = 4;        // drafts before skipping is considered
constexpr int kMaxInterval = 64;  // rounds between probes at most

}  // namespace

void CostTable::measure(const std::function<double(int)>& seconds, double limit_seconds) {
    double spent = 0.0;
    size_t known = 0;
    for (; known < kSizes.size(); ++known) {
        if (known >= 2 && spent >= limit_seconds) break;
        // The best of up to three: other work on the machine only ever adds time.
        double best = HUGE_VAL;
        for (int repeat = 0; repeat < 3; ++repeat) {
            const double t = seconds(kSizes[known]);
            spent += t;
            best = std::min(best, t);
            if (spent >= limit_seconds) break;
        }
        seconds_[known] = best;
    }
    for (size_t i = known; i < kSizes.size(); ++i) {
        const double slope = (seconds_[known - 1] - seconds_[0]) / std::max(1, kSizes[known - 1] - kSizes[0]);
        seconds_[i] = seconds_[known - 1] + slope * (kSizes[i] - kSizes[known - 1]);
    }
    make_monotone();
    measured_ = true;
}

void CostTable::observe(int nodes, double seconds) {
    if (!measured_) return;
    const auto at = std::lower_bound(kSizes.begin(), kSizes.end(), nodes);
    if (at == kSizes.end() || *at != nodes) return;
    const size_t i = at - kSizes.begin();
    const double ratio = std::clamp(seconds / seconds_[i], 0.5, 2.0);
    for (double& s : seconds_)
        s *= 1.0 + kBlend * (ratio - 1.0);  // context grew, clocks changed: all sizes alike
    seconds_[i] += kBlend * (seconds - seconds_[i]);
    make_monotone();
}

void CostTable::make_monotone() {
    for (size_t i = 1; i < seconds_.size(); ++i) seconds_[i] = std::max(seconds_[i], seconds_[i - 1]);
}

int Budget::max_nodes() const {
    return automatic() ? kMaxNodes : std::min(fixed_, kMaxNodes);
}

bool Budget::draft_now() {
    if (fixed_ == 0) return false;
    if (!automatic() || drafts_seen_ < kWarmUp || draft_gain_ > 0.0) return true;
    if (skip_ > 0) {
        --skip_;
        return false;
    }
    interval_ = std::min(2 * interval_, kMaxInterval);
    skip_ = interval_;
    return true;
}

int Budget::choose(std::span<const double> node_weight, const CostTable& costs) {
    const int count = static_cast<int>(node_weight.size()) - 1;
    if (!automatic()) return std::min(count, max_nodes());
    if (!costs.measured() || count <= 0) return std::max(count, 0);
    const double base_rate = 1.0 / costs.seconds(0);
    const double lambda = time_ > 0.0 ? std::max(tokens_ / time_, base_rate) : base_rate;
    double expected = 1.0, best_value = 1.0 - lambda * costs.seconds(0);
    int best = 0, summed = 0;
    for (size_t i = 1; i < CostTable::kSizes.size() && summed < count; ++i) {
        const int n = std::min(CostTable::kSizes[i], count);
        for (; summed < n; ++summed) expected += std::exp(node_weight[summed + 1]);
        const double value = expected - lambda * costs.seconds(i);
        if (value > best_value) {
            best_value = value;
            best = n;
        }
    }
    return best;
}

void Budget::observe(int nodes, int emitted, double draft_seconds, double verify_seconds, bool drafted) {
    tokens_ = kDecay * tokens_ + emitted;
    time_ = kDecay * time_ + draft_seconds + verify_seconds;
    if (!drafted) return;
    ++drafts_seen_;
    const double lambda = time_ > 0.0 ? tokens_ / time_ : 0.0;
    const double gain = (emitted - 1) - lambda * draft_seconds - (nodes == 0 ? 1e-9 : 0.0);
    draft_gain_ = 0.8 * draft_gain_ + 0.2 * gain;
    if (gain > 0.0) interval_ = 1;
}

}  // namespace kdt
