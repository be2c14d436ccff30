// The drafter that asks the engine's DFlash draft model: a table of block_rows - 1 positions.
#pragma once

#include "draft/drafter.h"

namespace kdt {

class DFlashDrafter final : public Drafter {
  public:
    std::string name() const override { return "dflash"; }
    int sources() const override { return kFromTable; }
    bool uses_draft_model() const override { return true; }
    void propose(const DraftRequest& request, Proposal& proposal) override;
};

}  // namespace kdt
