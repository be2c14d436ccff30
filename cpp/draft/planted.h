// Drafts planted from a known continuation, to test that speculation changes nothing. At each root the true
// tokens stand at random ranks among random siblings, and break off at a random depth: long paths through
// children that are not the first are accepted, which a drafter that guesses on random weights would never
// show.
#pragma once

#include "draft/drafter.h"

namespace kdt {

struct PlantedOptions {
    uint64_t seed = 0;
    int depth = 16;
    int width = 8;
    float break_probability = 0.1f;  // per depth: from there on the table holds only wrong tokens
    bool as_paths = false;           // the same drafts as weighted paths: beside another drafter's table
};

class PlantedDrafter final : public Drafter {
  public:
    // `truth`: prompt and continuation, by absolute position.
    PlantedDrafter(std::vector<int32_t> truth, int vocab, const PlantedOptions& options);
    std::string name() const override { return "planted"; }
    int sources() const override { return options_.as_paths ? kFromPath : kFromTable; }
    void propose(const DraftRequest& request, Proposal& proposal) override;

  private:
    const std::vector<int32_t> truth_;
    const int vocab_;
    const PlantedOptions options_;
};

}  // namespace kdt
