// When a decoding of a golden bundle is right: the rules of kdtree-verify, on plain arrays. docs/numerics.md
// ("Judging a decoding") states them, and python/harness/matrix.py judges by the same.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/dtype.h"

namespace kdt {

struct Decoding {
    std::vector<int32_t> tokens;
    std::vector<float> logits;  // [tokens, vocab], behind each token
};

struct Verdict {
    size_t tokens_equal = 0;  // leading tokens that are the oracle's
    bool exact = false;       // all of them, and no more
    // |logit - the oracle's|: the largest of all, and in bf16 the median over positions of each one's
    // largest, along the oracle's text; NaN where one was. And what the judged one of them may be.
    double largest = 0.0, median = 0.0, allowed = 0.0;
    bool compared_bits = false, same_bits = false;  // with the plain run's
    std::vector<std::string> faults;                // a sentence each; none: it passes

    bool pass() const { return faults.empty(); }
};

// `precision`: f32, where tokens and logits are the oracle's, or bf16, where logits are judged along the
// oracle's own text (`along`: [oracle.tokens, vocab], empty in f32) and tokens are not. `plain`: for a
// decoding with trees, the plain one, whose tokens and logits it must have bit for bit in either precision.
Verdict judge(const Decoding& oracle, int vocab, DType precision, const Decoding& run,
              const std::vector<float>& along, const Decoding* plain);

}  // namespace kdt
