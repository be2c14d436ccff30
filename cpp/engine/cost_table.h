// What a verify costs, by number of nodes: measured once per engine, refined while it runs.
#pragma once

#include <array>
#include <cstddef>
#include <functional>

namespace kdt {

// Seconds of a verify by number of nodes.
class CostTable {
  public:
    // With the root these fill matrix tiles of 8 rows where they can: 7 nodes cost what 5 do, 8 a tile more.
    static constexpr std::array<int, 16> kSizes = {0, 1, 2, 3, 4, 5, 7, 8, 11, 15, 16, 23, 31, 32, 47, 64};
    static constexpr double kLimitSeconds = 0.5;

    // Times `verify(nodes)` for as many sizes as fit into `limit` seconds, the most telling first; what is
    // left is interpolated, and known better as rounds are observed. `prepare(nodes)`, before the first time
    // of a size, is what must not be timed, and returns the seconds that it took.
    void measure(const std::function<double(int)>& verify, double limit = kLimitSeconds,
                 const std::function<double(int)>& prepare = {});
    bool measured() const { return measured_; }
    // Whether the cost of a plain round is known: nothing is measured before, since it says how much fits.
    bool plain_known() const { return known_[0]; }
    // A verify over `nodes` nodes took this long: moves the whole table a little (context grew, clocks
    // changed), and this entry a little more.
    void observe(int nodes, double seconds);
    // Of the smallest captured size that holds `nodes`.
    double seconds(int nodes) const { return seconds_[index(nodes)]; }
    // Of that size in kSizes.
    static size_t index(int nodes);

  private:
    void fill();  // interpolates what is not known; more nodes never cost less

    std::array<double, kSizes.size()> seconds_{}, raw_{};
    std::array<bool, kSizes.size()> known_{};
    bool measured_ = false;
};

}  // namespace kdt
