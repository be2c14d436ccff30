// Golden bundles (.kdtr): a model with its prompt, plain-decoding tokens and logits, and draft tables, in one
// file.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "core/kdtr.h"
#include "draft/replay.h"
#include "engine/engine.h"

namespace kdt {

// Weights and config of a bundle. Checksums are verified first. Names that belong to the golden data are
// skipped; any other unknown name is an error.
std::shared_ptr<const Engine> load_engine(const KdtrFile& file, const DeviceOptions& options);

struct GoldenRun {
    std::vector<int32_t> prompt;             // prompt.tokens
    std::vector<int32_t> tokens;             // plain.tokens [n]
    std::vector<float> logits;               // plain.logits [n, vocab]
    std::shared_ptr<ReplayDrafter> drafter;  // draft.position, draft.tokens, draft.logp
};

GoldenRun load_golden_run(const KdtrFile& file, int vocab);

}  // namespace kdt
