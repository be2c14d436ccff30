// Several drafters whose proposals go into one tree: a table at most, and paths. The tree takes the union of
// the prefixes; a node remembers who proposed it (ddtree/build.h).
#pragma once

#include "draft/drafter.h"

namespace kdt {

class CombinedDrafter final : public Drafter {
  public:
    explicit CombinedDrafter(std::vector<std::shared_ptr<Drafter>> drafters);
    std::string name() const override;
    int sources() const override;
    bool uses_draft_model() const override;
    void propose(const DraftRequest& request, Proposal& proposal) override;
    void parts(std::vector<Drafter*>& out) override;

  private:
    const std::vector<std::shared_ptr<Drafter>> drafters_;
};

}  // namespace kdt
