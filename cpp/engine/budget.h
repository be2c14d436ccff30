// How much to draft and how many draft nodes to verify. The choice never reaches the output (law 2); it only
// decides how fast the output comes.
//
// A round over the first n nodes emits 1 + sum of their probabilities tokens in expectation and takes C(n)
// seconds. The long-run rate is largest when a round grows while p_n > lambda * dC(n), lambda being the
// running rate in tokens per second (renewal-reward; the ratio rule of CaDDTree, arXiv 2606.01813, is its
// one-round form). Only sizes that are captured are candidates, and 0 nodes is one of them: on a sparse
// mixture of experts a wide verify can cost more than it brings.
//
// Whether to draft at all is decided before, for each source (draft table, paths) on its own. A draft says
// itself what it is worth: the gain to be expected of it, in tokens, from its probabilities as calibrated by
// what was accepted, less what it and its nodes cost. A source is asked while the running mean of that is
// positive; then it is probed now and again. Beside that mean stands a purse of tokens, so that none of it
// needs to be believed: a draft pays in what it really won and pays out what it cost, measured against plain
// decoding, and a small share of the time is pocket money. What drafts that bring nothing can cost is bounded
// by what is in the purse, whatever a draft costs and says.
#pragma once

#include <array>
#include <span>

#include "core/limits.h"
#include "engine/cost_table.h"

namespace kdt {

// The tree of a round, in pop order, node 0 the root.
struct TreeView {
    std::span<const int32_t> token, parent, source;
    std::span<const double> weight;  // log-probability of the path
    int count() const { return static_cast<int>(weight.size()) - 1; }
};

struct RoundOutcome {
    TreeView tree;
    int nodes = 0;                     // verified
    std::span<const int32_t> path;     // rows accepted, the root first
    std::span<const int32_t> emitted;  // the target's token after each of them
    int asked = 0;                     // sources that drafted: kFromTable, kFromPath
    std::array<double, 2> draft{};     // seconds that they took: table, paths
    double seconds = 0.0;              // of everything else: build, verify, accept, commit
};

// What drafts of one kind of drafter have brought and cost. It outlives the generation that learned it: an
// engine keeps that of the last one that ended, and the next one starts from it.
struct DraftRecord {
    static constexpr double kFirstPurse = 2.0;
    struct Source {
        double purse = kFirstPurse;  // tokens of plain decoding
        double earned = 0.0;         // decaying sum of gains: how much credit it deserves
        double value = 0.0;          // running mean of what drafts promised, in tokens
        bool known = false;          // whether a draft has said so
        double seconds = 0.0;        // of a draft, running mean
        bool timed = false;
    };
    // How often steps of one kind are right, against how often they say so: decaying sums over the nodes
    // that a walk came to.
    struct Calibration {
        double hits = 0.0, claims = 0.0;
        double ratio() const { return (hits + 1.0) / (claims + 1.0); }
    };
    static constexpr int kClasses = 6;  // table, path, both; each on the spine and off it

    double tokens = 0.0, time = 0.0;  // decaying sums: their ratio is lambda
    std::array<Source, 2> sources;    // table, paths
    std::array<Calibration, kClasses> calibration;
};

class Budget {
  public:
    // `fixed` >= 0: that many nodes always. -1: chosen by cost, starting from what was learned before: of
    // other texts, so it weighs little, and a purse is cut to what one text may lose. `tokens`: at most so
    // many follow, which says how much looking at the new text is worth.
    explicit Budget(int fixed, const DraftRecord& before = {}, int tokens = 0);

    bool automatic() const { return fixed_ < 0; }
    int fixed() const { return fixed_; }
    // Nodes worth building: a tree that was verified to its end is built larger next time.
    int max_nodes() const { return automatic() ? reach_ : fixed_; }
    const DraftRecord& record() const { return record_; }

    // Which of the `available` sources to ask this round. `repeats`: the share of the last tokens that went
    // on as the text did before (Repetition). Where it is high, drafts are likely to be right: a hint that
    // costs nothing, on which a source is looked at a little earlier than its purse allows.
    int sources(int available, const CostTable& costs, double repeats = 0.0);
    // Number of nodes to verify.
    int choose(const TreeView& tree, const CostTable& costs);
    void observe(const RoundOutcome& round, const CostTable& costs);
    // Drafts of a source take about this long: known before the first one is paid for.
    void expect_draft(int bit, double seconds);
    bool draft_timed(int bit) const;

    // For reports: running tokens per second, and the calibrated probability of each node.
    double rate(const CostTable& costs) const;
    std::array<double, kMaxTreeRows> probabilities(const TreeView& tree) const;

  private:
    double credit(const DraftRecord::Source& source) const;
    bool open(const DraftRecord::Source& source) const;
    double price(const DraftRecord::Source& source, const CostTable& costs) const;
    void calibrate(const RoundOutcome& round);

    struct Probing {
        int interval = 0, wait = 0;  // rounds
    };

    int fixed_;
    DraftRecord record_;
    double gift_ = 0.0;                 // tokens: what looking at a new text may cost
    bool first_ = true;                 // nobody was asked yet
    std::array<Probing, 2> probing_;    // of sources that are not open
    std::array<double, 2> promised_{};  // by the drafts of this round, in tokens
    int shares_ = 1;                    // sources among which pocket money is divided
    int asked_ = 0;                     // this round
    int reach_ = kMaxNodes;
};

}  // namespace kdt
