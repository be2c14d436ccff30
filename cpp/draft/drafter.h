// The drafter interface. A new drafter is one implementation of it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kdt {

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
};

class Drafter {
  public:
    virtual ~Drafter() = default;
    virtual std::string name() const = 0;

    // `tokens` is the whole prefix, the root (the last emitted token, at position tokens.size() - 1)
    // included; no path needs to be longer than `max_depth`. The proposal must be a bitwise function of the
    // prefix alone: never of budgets, of clocks, or of what was proposed before.
    virtual void propose(std::span<const int32_t> tokens, int max_depth, Proposal& proposal) = 0;
};

}  // namespace kdt
