// How much to draft and how many draft nodes to verify. The choice never reaches the output (law 2); it only
// decides how fast the output comes.
//
// A round over the first n nodes emits 1 + sum of their probabilities tokens in expectation and takes C(n)
// seconds. The long-run rate is largest when a round grows while p_n > lambda * dC(n), lambda being the
// running rate in tokens per second (renewal-reward; the ratio rule of CaDDTree, arXiv 2606.01813, is its
// one-round form). Only sizes that are captured are candidates, and 0 nodes is one of them: on a sparse
// mixture of experts a wide verify can cost more than it brings. Whether to draft at all is decided before,
// for each source (draft table, paths) on its own, from what its drafts have brought.
#pragma once

#include <array>
#include <functional>
#include <span>

#include "core/limits.h"

namespace kdt {

// Seconds of a verify by number of nodes.
class CostTable {
  public:
    static constexpr std::array<int, 13> kSizes = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};
    static constexpr double kLimitSeconds = 0.5;

    // Times `verify(nodes)` for as many sizes as fit into `limit` seconds, the most telling first; what is
    // left is interpolated, and known better as rounds are observed.
    void measure(const std::function<double(int)>& verify, double limit = kLimitSeconds);
    bool measured() const { return measured_; }
    // Whether the cost of a plain round is known: nothing is measured before, since it says how much fits.
    bool plain_known() const { return known_[0]; }
    // A verify over `nodes` nodes took this long: moves the whole table a little (context grew, clocks
    // changed), and this entry a little more.
    void observe(int nodes, double seconds);
    // Of the smallest captured size that holds `nodes`.
    double seconds(int nodes) const { return seconds_[index(nodes)]; }

  private:
    static size_t index(int nodes);
    void fill();  // interpolates what is not known; more nodes never cost less

    std::array<double, kSizes.size()> seconds_{}, raw_{};
    std::array<bool, kSizes.size()> known_{};
    bool measured_ = false;
};

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

class Budget {
  public:
    // `fixed` >= 0: that many nodes always. -1: chosen by cost.
    explicit Budget(int fixed) : fixed_(fixed) {}

    bool automatic() const { return fixed_ < 0; }
    int fixed() const { return fixed_; }
    int max_nodes() const { return automatic() ? kMaxNodes : fixed_; }

    // Which of the `available` sources to ask this round. A source whose drafts do not pay is asked again
    // after 2, 4, 8, … rounds, up to the interval at which asking costs kProbeShare of the time.
    int sources(int available, const CostTable& costs);
    // Number of nodes to verify.
    int choose(const TreeView& tree, const CostTable& costs);
    void observe(const RoundOutcome& round, const CostTable& costs);

    // For reports: running tokens per second, and the calibrated probability of each node.
    double rate(const CostTable& costs) const;
    std::array<double, kMaxTreeRows> probabilities(const TreeView& tree) const;

  private:
    // Drafts of one kind. A draft's gain is what it won less what it cost, in tokens. A source is no longer
    // asked, but for probes, when its mean gain is negative, or (sooner) when its credit is used up, which is
    // the sum of its gains within limits.
    struct Source {
        bool open = true, probing = false;
        double credit = 2.0;
        double gain = 0.0;  // running mean over `drafts`, the last kGainMemory of them at most
        int drafts = 0;
        double seconds = 0.0;  // of a draft, running mean
        bool timed = false;
        double won = 0.0;  // since it was opened
        int interval = 1, wait = 0;
    };
    // How often steps of one kind are right, against how often they say so: decaying sums over the nodes
    // that a walk came to.
    struct Calibration {
        double hits = 0.0, claims = 0.0;
        double ratio() const { return (hits + 1.0) / (claims + 1.0); }
    };
    static constexpr int kClasses = 6;  // table, path, both; each on the spine and off it

    int longest_interval(const Source& source, const CostTable& costs) const;
    void settle(int bit, double gain, const CostTable& costs);
    void calibrate(const RoundOutcome& round);

    int fixed_;
    double tokens_ = 0.0, time_ = 0.0;  // decaying sums: their ratio is lambda
    int cap_ = 2;                       // nodes at most: doubles while trees of this size pay
    int idle_ = 0;                      // drafts in a row of which no node was verified
    std::array<Source, 2> sources_;     // table, paths
    std::array<Calibration, kClasses> calibration_;
};

}  // namespace kdt
