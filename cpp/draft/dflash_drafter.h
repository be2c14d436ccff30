// The drafter that asks the engine's DFlash draft model: a table of block_rows - 1 positions, of which it
// keeps the `width` likeliest tokens each. Width 1 is a chain: every tree of it is one path.
#pragma once

#include "core/limits.h"
#include "draft/drafter.h"

namespace kdt {

class DFlashDrafter final : public Drafter {
  public:
    // Throws invalid_argument for a width that is not 1 to kMaxTableWidth.
    explicit DFlashDrafter(int width = kMaxTableWidth);

    std::string name() const override { return "dflash"; }
    int sources() const override { return kFromTable; }
    bool uses_draft_model() const override { return true; }
    void propose(const DraftRequest& request, Proposal& proposal) override;

  private:
    int width_;
};

}  // namespace kdt
