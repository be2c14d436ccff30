#include "draft/dflash_drafter.h"

#include "core/error.h"
#include "draft/dflash_sequence.h"

namespace kdt {

void DFlashDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    proposal.clear();
    if (request.draft_model == nullptr)
        fail(ErrorCode::invalid_argument, "the drafter dflash was asked without a draft model");
    const int root = static_cast<int>(request.tokens.size()) - 1;
    if (request.draft_model->end() != root)
        fail(ErrorCode::internal, "the draft model knows %d positions of the %d before the root",
             request.draft_model->end(), root);
    request.draft_model->propose(request.tokens.back(), proposal);
}

}  // namespace kdt
