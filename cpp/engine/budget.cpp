#include "engine/budget.h"

#include <algorithm>
#include <cmath>

#include "ddtree/tree.h"

namespace kdt {

namespace {

constexpr double kDecay = 0.98;        // of running sums, per round
constexpr double kScaleBlend = 0.05;   // weight of one observation in the whole cost table
constexpr double kEntryBlend = 0.1;    // and in its own entry
constexpr double kUnknownSlope = 0.5;  // of a plain round per node, where only that is known
constexpr double kMaxCredit = 8.0;     // tokens: how much of a good past a source can lose
constexpr double kWorstGain = -4.0;    // of one round: one bad measurement closes nothing
constexpr int kGainMemory = 64;        // drafts in a mean gain
constexpr int kLeastDrafts = 16;       // before a mean gain counts
constexpr double kProbeWeight = 0.5;   // of a probe in the mean gain
constexpr int kIdle = 4;               // drafts without a node worth verifying before trees start small again
constexpr int kFirstTree = 2;          // nodes of a probe
constexpr int kProbeReach = 16;        // nodes that a probe may add to a tree of another source
constexpr double kProbeShare = 0.015;  // of the time, for probes of a source that does not pay
constexpr int kLeastInterval = 8, kMostInterval = 1024;

size_t source_index(int bit) {
    return bit == kFromTable ? 0 : 1;
}

// Whether each node continues the spine: first children all the way from the root.
std::array<bool, kMaxTreeRows> spine_of(const TreeView& tree) {
    std::array<bool, kMaxTreeRows> spine{}, has_child{};
    spine[0] = true;
    for (int i = 1; i <= tree.count(); ++i) {
        const int parent = tree.parent[i];
        spine[i] = spine[parent] && !has_child[parent];
        has_child[parent] = true;
    }
    return spine;
}

// Nodes of a probe: one where a row costs so much that two could hardly pay.
int probe_nodes(double lambda, const CostTable& costs) {
    return lambda * (costs.seconds(kFirstTree) - costs.seconds(0)) > 1.0 ? 1 : kFirstTree;
}

int class_of(const TreeView& tree, const std::array<bool, kMaxTreeRows>& spine, int node) {
    return (tree.source[node] - 1) * 2 + (spine[tree.parent[node]] ? 0 : 1);
}

// What the drafter says of a node, given its parent.
double claim(const TreeView& tree, int node) {
    return std::exp(std::min(0.0, tree.weight[node] - tree.weight[tree.parent[node]]));
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------
// costs

size_t CostTable::index(int nodes) {
    return std::lower_bound(kSizes.begin(), kSizes.end() - 1, nodes) - kSizes.begin();
}

void CostTable::measure(const std::function<double(int)>& verify, double limit) {
    constexpr std::array<int, kSizes.size()> order = {0, 8, 2, 32, 16, 4, 1, 64, 3, 12, 6, 24, 48};
    double spent = 0.0;
    // The best of up to three: other work on the machine only ever adds time.
    for (int pass = 0; pass < 3; ++pass)
        for (const int nodes : order) {
            const size_t i = index(nodes);
            if ((pass > 0 && !known_[i]) || spent + seconds_[i] > limit) continue;
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

// ------------------------------------------------------------------------------------------------------------
// the choice

double Budget::rate(const CostTable& costs) const {
    const double plain = costs.seconds(0) > 0.0 ? 1.0 / costs.seconds(0) : 0.0;
    return time_ > 0.0 ? std::max(tokens_ / time_, plain) : plain;
}

int Budget::sources(int available, const CostTable& costs) {
    if (!automatic()) return fixed_ == 0 ? 0 : available;
    if (!costs.plain_known()) return 0;
    int asked = 0;
    for (const int bit : {kFromTable, kFromPath}) {
        if (!(available & bit)) continue;
        Source& s = sources_[source_index(bit)];
        s.probing = false;
        if (!s.open) {
            if (s.wait > 0) {
                --s.wait;
                continue;
            }
            s.probing = true;
        }
        asked |= bit;
    }
    return asked;
}

std::array<double, kMaxTreeRows> Budget::probabilities(const TreeView& tree) const {
    std::array<double, kMaxTreeRows> p{};
    const auto spine = spine_of(tree);
    p[0] = 1.0;
    for (int i = 1; i <= tree.count(); ++i)
        p[i] = p[tree.parent[i]] *
               std::min(1.0, claim(tree, i) * calibration_[class_of(tree, spine, i)].ratio());
    return p;
}

int Budget::choose(const TreeView& tree, const CostTable& costs) {
    const int count = std::min(tree.count(), max_nodes());
    if (!automatic()) return count;
    if (count <= 0) return 0;
    const double lambda = rate(costs);
    const auto p = probabilities(tree);
    int best = 0, summed = 0;
    double expected = 1.0, most = 1.0 - lambda * costs.seconds(0);
    for (size_t i = 1; i < CostTable::kSizes.size() && summed < std::min(count, cap_); ++i) {
        const int n = std::min({CostTable::kSizes[i], count, cap_});
        for (; summed < n; ++summed) expected += p[summed + 1];
        const double value = expected - lambda * costs.seconds(n);
        if (value > most) {
            most = value;
            best = n;
        }
    }
    // A probe verifies a few nodes of its source whatever they promise: it is there to find out.
    const int wanted = probe_nodes(lambda, costs);
    for (const int bit : {kFromTable, kFromPath}) {
        if (!sources_[source_index(bit)].probing) continue;
        int own = 0, last = 0;
        for (int i = 1; i <= std::min(count, kProbeReach) && own < wanted; ++i)
            if (tree.source[i] == bit) {
                ++own;
                last = i;
            }
        best = std::max(best, last);
    }
    return best;
}

// ------------------------------------------------------------------------------------------------------------
// what it brought

void Budget::calibrate(const RoundOutcome& round) {
    const TreeView& tree = round.tree;
    const auto spine = spine_of(tree);
    std::array<bool, kClasses> seen{};
    for (size_t j = 0; j < round.path.size(); ++j)
        for (int i = round.path[j] + 1; i <= round.nodes; ++i) {
            if (tree.parent[i] != round.path[j]) continue;
            const int c = class_of(tree, spine, i);
            if (!seen[c]) {
                calibration_[c].hits *= kDecay;
                calibration_[c].claims *= kDecay;
                seen[c] = true;
            }
            calibration_[c].claims += claim(tree, i);
            calibration_[c].hits += tree.token[i] == round.emitted[j];
        }
}

// At which asking costs kProbeShare of the time.
int Budget::longest_interval(const Source& s, const CostTable& costs) const {
    const double lambda = rate(costs);
    const double verify = costs.seconds(probe_nodes(lambda, costs)) - costs.seconds(0);
    const double loss = lambda * (s.seconds + verify);
    return static_cast<int>(std::clamp(loss / kProbeShare, double{kLeastInterval}, double{kMostInterval}));
}

void Budget::settle(int bit, double gain, const CostTable& costs) {
    Source& s = sources_[source_index(bit)];
    gain = std::clamp(gain, kWorstGain, kMaxCredit);
    if (s.open) {
        s.drafts = std::min(s.drafts + 1, kGainMemory);
        s.gain += (gain - s.gain) / s.drafts;
        s.won += gain;
        s.credit = std::min(s.credit + gain, kMaxCredit);
        if (s.credit >= 0.0 && (s.gain >= 0.0 || s.drafts < kLeastDrafts)) return;
        s.open = false;
        // Opened in vain: the interval goes on growing. After good times it starts anew.
        s.interval = s.won > 0.0 ? 2 : std::min(2 * s.interval, longest_interval(s, costs));
        s.wait = s.interval;
        return;
    }
    s.gain += kProbeWeight * (gain - s.gain);
    if (s.gain > 0.0) {
        s.open = true;
        s.won = 0.0;
        s.credit = 1.0 + s.gain;
        s.drafts = kLeastDrafts / 2;
        calibration_[(bit - 1) * 2] = calibration_[(bit - 1) * 2 + 1] = {};  // of another time
        cap_ = kFirstTree;
        return;
    }
    if (gain > 0.0) {  // better than it was: look again soon
        s.wait = 2;
        return;
    }
    s.interval = std::min(2 * s.interval, longest_interval(s, costs));
    s.wait = s.interval;
}

void Budget::observe(const RoundOutcome& round, const CostTable& costs) {
    if (!automatic()) return;
    tokens_ = kDecay * tokens_ + static_cast<double>(round.emitted.size());
    time_ = kDecay * time_ + round.seconds + round.draft[0] + round.draft[1];
    if (round.asked == 0) return;
    calibrate(round);

    const double lambda = rate(costs);
    double total = 0.0;
    for (const int bit : {kFromTable, kFromPath}) {
        if (!(round.asked & bit)) continue;
        Source& s = sources_[source_index(bit)];
        const double took = round.draft[source_index(bit)];
        s.seconds = s.timed ? s.seconds + 0.1 * (took - s.seconds) : took;
        s.timed = true;
        // Its own part: accepted nodes that no other source proposed, and what the round would have cost
        // without such nodes.
        int others = 0, won = 0;
        for (int i = 1; i <= round.nodes; ++i) others += round.tree.source[i] != bit;
        for (size_t j = 1; j < round.path.size(); ++j) won += round.tree.source[round.path[j]] == bit;
        const double gain = won - lambda * (took + costs.seconds(round.nodes) - costs.seconds(others));
        total += gain;
        settle(bit, gain, costs);
    }
    idle_ = round.nodes == 0 ? idle_ + 1 : 0;
    if (idle_ >= kIdle)
        cap_ = kFirstTree;
    else if (round.nodes >= cap_ && total > 0.0)
        cap_ = std::min(2 * cap_, kMaxNodes);
}

}  // namespace kdt
