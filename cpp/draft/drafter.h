// The drafter interface. A new drafter is one implementation of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ddtree/tree.h"

namespace kdt {

class DFlashSequence;

// What a drafter says about the future of a prefix: for depths 1..depth the `width` most probable tokens with
// their log-probabilities (log-softmax over the full vocabulary, temperature 1, descending), and any number
// of weighted paths.
struct Proposal {
    int depth = 0;
    int width = 0;
    std::vector<int32_t> table_token;  // [depth, width]
    std::vector<float> table_logp;     // [depth, width]

    struct Path {
        std::vector<int32_t> token;
        std::vector<float> logp;  // of each step, given the steps before it
    };
    std::vector<Path> paths;

    bool empty() const { return depth == 0 && paths.empty(); }
    void clear() { *this = Proposal{}; }
    // Adds what another drafter says: its paths, and its table where there is none yet. Two tables are an
    // error.
    void merge(Proposal&& other);
};

struct DraftRequest {
    // The whole prefix, the root (the last emitted token, at position tokens.size() - 1) included.
    std::span<const int32_t> tokens;
    int max_depth = 0;  // no path needs to be longer
    // The draft model's state of this prefix; null unless the drafter says that it uses the draft model.
    DFlashSequence* draft_model = nullptr;
};

class Drafter {
  public:
    virtual ~Drafter() = default;
    virtual std::string name() const = 0;

    // What its proposals hold: kFromTable, kFromPath, or both.
    virtual int sources() const = 0;
    // Whether it reads the engine's draft model, for which the target's taps are then kept.
    virtual bool uses_draft_model() const { return false; }

    // The proposal must be a bitwise function of the prefix alone: never of budgets, of clocks, or of what
    // was proposed before.
    virtual void propose(const DraftRequest& request, Proposal& proposal) = 0;

    // The drafters of which it consists, itself where it is a single one: each can be asked, or spared, on
    // its own.
    virtual void parts(std::vector<Drafter*>& out) { out.push_back(this); }
};

}  // namespace kdt
