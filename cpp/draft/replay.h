// Replays recorded draft tables, keyed by the absolute position of the root: golden bundles and tests.
#pragma once

#include <map>

#include "draft/drafter.h"

namespace kdt {

class ReplayDrafter final : public Drafter {
  public:
    // positions [P] strictly increasing; tokens and logp [P, depth, width].
    ReplayDrafter(std::span<const int32_t> positions, std::span<const int32_t> tokens,
                  std::span<const float> logp, int depth, int width);
    std::string name() const override { return "replay"; }
    int sources() const override { return kFromTable; }
    void propose(const DraftRequest& request, Proposal& proposal) override;

  private:
    int depth_, width_;
    std::vector<int32_t> tokens_;
    std::vector<float> logp_;
    std::map<int32_t, size_t> index_;  // root position -> entry
};

}  // namespace kdt
