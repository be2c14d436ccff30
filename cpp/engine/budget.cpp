#include "engine/budget.h"

#include <algorithm>
#include <cmath>

#include "ddtree/tree.h"

namespace kdt {

namespace {

constexpr double kDecay = 0.95;         // of the sums behind the running rate, per round
constexpr double kForget = 0.98;        // of calibration, per observation
constexpr double kMostPurse = 3.0;      // tokens that a source may lose of what it has not earned
constexpr double kEarnedShare = 0.1;    // and of what it has
constexpr double kMostCredit = 8.0;     // at most
constexpr double kTrust = 1.0;          // tokens of credit with which a source is asked whatever it promises
constexpr double kLeastProbe = 0.1;     // tokens that a probe is taken to cost at least
constexpr double kEarnedForget = 0.98;  // per draft
constexpr double kPocketMoney = 0.005;  // of the time, for sources that do not pay
constexpr double kGiftShare = 0.004;    // of the tokens that may follow, for a look at a new text
constexpr double kMostGift = 1.0;       // tokens
constexpr double kSecondsBlend = 0.1;   // weight of one draft in what drafts take
constexpr double kValueBlend = 0.125;   // and in what they promise
constexpr double kProbeBlend = 0.5;     // of a probe
constexpr double kMostPrior = 0.5;  // tokens that a draft of a new text promises, whatever the last one's did
constexpr double kRepeats = 0.3;    // share of repeated tokens at which a text invites drafts
constexpr double kAdvance = 2.0;    // tokens that a look at such a text may be in debt
constexpr int kFirstInterval = 2;   // rounds to the first probe of a source that was just closed; doubles
constexpr int kProbe = 2;           // nodes that a probe verifies at least
constexpr int kProbeReach = 16;     // nodes that it may add to a tree of another source
constexpr double kNodesShare = 0.2;   // of what a draft costs: what its nodes may cost in any case
constexpr int kLeastReach = 16;       // nodes that are always built
constexpr double kPriorRounds = 8.0;  // weight of another text's rate
constexpr double kPriorClaims = 8.0;  // of its calibration

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

int class_of(const TreeView& tree, const std::array<bool, kMaxTreeRows>& spine, int node) {
    return (tree.source[node] - 1) * 2 + (spine[tree.parent[node]] ? 0 : 1);
}

// What the drafter says of a node, given its parent.
double claim(const TreeView& tree, int node) {
    return std::exp(std::min(0.0, tree.weight[node] - tree.weight[tree.parent[node]]));
}

}  // namespace

Budget::Budget(int fixed, const DraftRecord& before, int tokens)
    : fixed_(fixed), record_(before), gift_(std::min(kGiftShare * tokens, kMostGift)) {
    if (record_.tokens > kPriorRounds) {
        record_.time *= kPriorRounds / record_.tokens;
        record_.tokens = kPriorRounds;
    }
    for (DraftRecord::Source& s : record_.sources) {
        s.value = std::min(s.value, kMostPrior);
    }
    for (DraftRecord::Calibration& c : record_.calibration) {
        const double scale = c.claims > kPriorClaims ? kPriorClaims / c.claims : 1.0;
        c.hits *= scale;
        c.claims *= scale;
    }
}

double Budget::rate(const CostTable& costs) const {
    const double plain = costs.seconds(0) > 0.0 ? 1.0 / costs.seconds(0) : 0.0;
    return record_.time > 0.0 ? std::max(record_.tokens / record_.time, plain) : plain;
}

bool Budget::draft_timed(int bit) const {
    return record_.sources[source_index(bit)].timed;
}

void Budget::expect_draft(int bit, double seconds) {
    DraftRecord::Source& s = record_.sources[source_index(bit)];
    if (s.timed) return;
    s.seconds = seconds;
    s.timed = true;
}

// What a draft costs that brings nothing, in tokens of plain decoding.
double Budget::price(const DraftRecord::Source& s, const CostTable& costs) const {
    return (s.seconds + costs.seconds(kProbe)) / costs.seconds(0) - 1.0;
}

// Tokens that it may be in debt.
double Budget::credit(const DraftRecord::Source& s) const {
    return std::min(kEarnedShare * s.earned, kMostCredit);
}

// Whether it is asked every round: its drafts promise more than they cost, or have earned the benefit of the
// doubt; and it has not lost too much.
bool Budget::open(const DraftRecord::Source& s) const {
    return s.known && (s.value > 0.0 || credit(s) >= kTrust) && s.purse > -credit(s);
}

int Budget::sources(int available, const CostTable& costs, double repeats) {
    asked_ = 0;
    if (!automatic()) return fixed_ == 0 ? 0 : available;
    if (!costs.plain_known()) return 0;
    shares_ = (available & kFromTable) && (available & kFromPath) ? 2 : 1;
    for (const int bit : {kFromTable, kFromPath}) {
        if (!(available & bit)) continue;
        DraftRecord::Source& s = record_.sources[source_index(bit)];
        Probing& probing = probing_[source_index(bit)];
        if (first_) {  // what it won with another text is cut, what was saved up for a dear draft is not
            s.purse = std::min(s.purse, std::max(kMostPurse, price(s, costs)));
            s.purse = std::max(s.purse, std::min(price(s, costs), s.purse + gift_ / shares_));
        }
        if (open(s)) {
            asked_ |= bit;
        } else if (probing.wait > 0) {
            --probing.wait;
        } else {
            const double cost =
                s.known ? std::min(std::max(-s.value, kLeastProbe), price(s, costs)) : price(s, costs);
            const double advance = repeats >= kRepeats ? kAdvance : 0.0;
            if (s.purse + advance >= cost) asked_ |= bit;
        }
    }
    first_ = false;
    return asked_;
}

std::array<double, kMaxTreeRows> Budget::probabilities(const TreeView& tree) const {
    std::array<double, kMaxTreeRows> p{};
    const auto spine = spine_of(tree);
    p[0] = 1.0;
    for (int i = 1; i <= tree.count(); ++i)
        p[i] = p[tree.parent[i]] *
               std::min(1.0, claim(tree, i) * record_.calibration[class_of(tree, spine, i)].ratio());
    return p;
}

int Budget::choose(const TreeView& tree, const CostTable& costs) {
    if (!automatic()) return std::min(tree.count(), fixed_);
    const int count = tree.count();
    promised_ = {};
    if (!asked_) return 0;
    const double lambda = rate(costs), plain = costs.seconds(0);
    const auto p = probabilities(tree);
    // What the purses hold behind the drafts themselves: nodes may cost that, too. What costs little beside a
    // draft that is paid anyway is always allowed.
    double purse = 0.0, drafts = 0.0;
    for (const int bit : {kFromTable, kFromPath}) {
        const DraftRecord::Source& s = record_.sources[source_index(bit)];
        if (!(asked_ & bit)) continue;
        drafts += s.seconds / plain;
        purse += s.purse + credit(s) - s.seconds / plain;
    }
    purse = std::max(purse, kNodesShare * drafts);
    int best = 0, affordable = 0, summed = 0;
    double expected = 1.0, most = 1.0 - lambda * plain;
    for (size_t i = 1; i < CostTable::kSizes.size() && summed < count; ++i) {
        const int n = std::min(CostTable::kSizes[i], count);
        for (; summed < n; ++summed) expected += p[summed + 1];
        const double value = expected - lambda * costs.seconds(n);
        if (value <= most) continue;
        most = value;
        best = n;
        if (n <= kProbe || costs.seconds(n) / plain - 1.0 <= purse) affordable = n;
    }
    int nodes = affordable;
    // Of each source: what its drafts promise. One that is not open shows a few nodes whatever they promise,
    // which is how one finds out; one only, where a row costs so much that two could hardly pay.
    const int wanted = lambda * (costs.seconds(kProbe) - plain) > 1.0 ? 1 : kProbe;
    for (const int bit : {kFromTable, kFromPath}) {
        if (!(asked_ & bit)) continue;
        const DraftRecord::Source& s = record_.sources[source_index(bit)];
        int others = 0;
        double own = 0.0;
        for (int i = 1; i <= best; ++i)
            if (tree.source[i] == bit)
                own += p[i];
            else
                ++others;
        promised_[source_index(bit)] =
            own - lambda * (s.seconds + costs.seconds(best) - costs.seconds(others));
        if (open(s) || !s.known) continue;
        int shown = 0, last = 0;
        for (int i = 1; i <= std::min(count, kProbeReach) && shown < wanted; ++i)
            if (tree.source[i] == bit) {
                ++shown;
                last = i;
            }
        nodes = std::max(nodes, last);
    }
    if (2 * best >= reach_)
        reach_ = std::min(2 * reach_, kMaxNodes);
    else if (8 * best < reach_)
        reach_ = std::max(reach_ / 2, kLeastReach);
    return nodes;
}

// ------------------------------------------------------------------------------------------------------------
// what it brought

void Budget::calibrate(const RoundOutcome& round) {
    const TreeView& tree = round.tree;
    const auto spine = spine_of(tree);
    std::array<bool, DraftRecord::kClasses> seen{};
    for (size_t j = 0; j < round.path.size(); ++j)
        for (int i = round.path[j] + 1; i <= round.nodes; ++i) {
            if (tree.parent[i] != round.path[j]) continue;
            const int c = class_of(tree, spine, i);
            if (!seen[c]) {
                record_.calibration[c].hits *= kForget;
                record_.calibration[c].claims *= kForget;
                seen[c] = true;
            }
            record_.calibration[c].claims += claim(tree, i);
            record_.calibration[c].hits += tree.token[i] == round.emitted[j];
        }
}

void Budget::observe(const RoundOutcome& round, const CostTable& costs) {
    if (!automatic()) return;
    const double took = round.seconds + round.draft[0] + round.draft[1], plain = costs.seconds(0);
    record_.tokens = kDecay * record_.tokens + static_cast<double>(round.emitted.size());
    record_.time = kDecay * record_.time + took;
    if (plain > 0.0)
        for (DraftRecord::Source& s : record_.sources)
            s.purse =
                std::max(s.purse, std::min(s.purse + kPocketMoney / shares_ * took / plain, price(s, costs)));
    if (round.asked == 0) return;
    calibrate(round);

    for (const int bit : {kFromTable, kFromPath}) {
        if (!(round.asked & bit)) continue;
        DraftRecord::Source& s = record_.sources[source_index(bit)];
        Probing& probing = probing_[source_index(bit)];
        const double draft = round.draft[source_index(bit)], promised = promised_[source_index(bit)];
        s.seconds = s.timed ? s.seconds + kSecondsBlend * (draft - s.seconds) : draft;
        s.timed = true;
        // Its own part: accepted nodes that no other source proposed, and what the round would have cost
        // without such nodes.
        int others = 0, won = 0;
        for (int i = 1; i <= round.nodes; ++i) others += round.tree.source[i] != bit;
        for (size_t j = 1; j < round.path.size(); ++j) won += round.tree.source[round.path[j]] == bit;
        const double gain = won - (s.seconds + costs.seconds(round.nodes) - costs.seconds(others)) / plain;
        const bool was_open = open(s);
        s.earned = std::max(0.0, kEarnedForget * s.earned + gain);
        s.purse = std::min(s.purse + gain, std::max(kMostPurse, s.purse));
        double worth = promised;
        if (s.known && !was_open && gain > 0.0) {
            // It won what it was not believed to win: what was learned was about another text.
            worth = std::max(promised, gain);
            record_.calibration[(bit - 1) * 2] = record_.calibration[(bit - 1) * 2 + 1] = {};
        }
        s.value += (s.known ? was_open ? kValueBlend : kProbeBlend : 1.0) * (worth - s.value);
        s.known = true;
        if (open(s)) continue;
        if (s.purse <= 0.0) {  // what it had earned pays its debts
            s.purse = std::min(0.0, s.purse + credit(s));
            s.earned *= 0.5;
            s.value = std::min(s.value, 0.0);  // it promised more than it kept
        }
        // As far apart as pocket money allows anyway, but no further.
        const int longest = static_cast<int>(std::clamp(price(s, costs) / kPocketMoney, 2.0, 1024.0));
        probing.interval =
            was_open || probing.interval == 0 ? kFirstInterval : std::min(2 * probing.interval, longest);
        probing.wait = probing.interval;
    }
}

}  // namespace kdt
