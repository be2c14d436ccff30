// How many draft nodes to verify. The choice never reaches the output (law 2); it only decides how fast the
// output comes.
//
// A round over the first n nodes emits 1 + sum of their probabilities tokens in expectation and takes C(n)
// seconds. The long-run rate is largest when a round keeps growing while a node's probability exceeds lambda
// * dC(n), lambda being running tokens per second (renewal-reward; the ratio rule of CaDDTree, arXiv
// 2606.01813, is its one-round form). Only sizes that are measured are candidates, and 0 nodes is one of
// them: on a sparse mixture of experts a wide verify can cost more than it brings.
#pragma once

#include <array>
#include <functional>
#include <span>

namespace kdt {

class CostTable {
  public:
    static constexpr std::array<int, 13> kSizes = {0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64};

    // Times `seconds(nodes)`, ascending, until `limit_seconds` are spent; sizes that are left are
    // extrapolated from the last slope.
    void measure(const std::function<double(int)>& seconds, double limit_seconds);
    bool measured() const { return measured_; }
    // A verify over `nodes` nodes took this long: moves the whole table by the ratio seen and the entry
    // itself a little more.
    void observe(int nodes, double seconds);
    double seconds(size_t size_index) const { return seconds_[size_index]; }

  private:
    void make_monotone();
    std::array<double, kSizes.size()> seconds_{};
    bool measured_ = false;
};

class Budget {
  public:
    // `fixed` >= 0: that many nodes always. -1: choose by cost.
    explicit Budget(int fixed) : fixed_(fixed) {}

    bool automatic() const { return fixed_ < 0; }
    int max_nodes() const;
    // Whether to draft at all this round. While drafting does not pay it is probed at exponentially growing
    // intervals.
    bool draft_now();
    // Number of nodes to verify, from the nodes' log-probabilities in pop order (root first).
    int choose(std::span<const double> node_weight, const CostTable& costs);
    // A round ended: its cost and what it brought.
    void observe(int nodes, int emitted, double draft_seconds, double verify_seconds, bool drafted);

  private:
    int fixed_;
    double tokens_ = 0.0, time_ = 0.0;  // decaying sums: their ratio is lambda
    double draft_gain_ = 0.0;           // tokens won by drafting, less its time in tokens: decaying mean
    int drafts_seen_ = 0;
    int skip_ = 0, interval_ = 1;
};

}  // namespace kdt
