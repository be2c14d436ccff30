// Prompt lookup: continue as the text went on after earlier occurrences of its last few tokens (Saxena,
// prompt lookup decoding, 2023). Costs no model; pays where the output repeats the input: edits, quotations,
// code.
#pragma once

#include "draft/drafter.h"

namespace kdt {

struct NgramOptions {
    int max_ngram = 4;    // longest suffix looked for first
    int min_ngram = 1;    // shortest that counts as a match
    int max_paths = 8;    // most recent matches that become paths
    int max_length = 24;  // tokens of a path
};

// Every match of the longest matching suffix is a path. Step j of a path has probability share * (m + j) / (m
// + j + 1): m is the length of the match (a longer one is more trustworthy, and grows as the path goes on),
// share the part of the matches that agree with the path up to this step among those that agreed up to the
// one before.
class NgramDrafter final : public Drafter {
  public:
    explicit NgramDrafter(const NgramOptions& options);
    std::string name() const override { return "ngram"; }
    int sources() const override { return kFromPath; }
    void propose(const DraftRequest& request, Proposal& proposal) override;

  private:
    const NgramOptions options_;
};

}  // namespace kdt
