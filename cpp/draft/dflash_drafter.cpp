#include "draft/dflash_drafter.h"

#include <algorithm>

#include "core/error.h"
#include "draft/dflash_sequence.h"

namespace kdt {

namespace {

// The first `width` of the `from` entries of every row.
template <typename T>
void keep_first(std::vector<T>& table, int depth, int from, int width) {
    for (int row = 1; row < depth; ++row)
        std::copy_n(table.begin() + static_cast<ptrdiff_t>(row) * from, width,
                    table.begin() + static_cast<ptrdiff_t>(row) * width);
    table.resize(static_cast<size_t>(depth) * width);
}

}  // namespace

DFlashDrafter::DFlashDrafter(int width) : width_(width) {
    if (width < 1 || width > kMaxTableWidth)
        fail(ErrorCode::invalid_argument, "the drafter dflash has a table of width %d; expected 1 to %d",
             width, kMaxTableWidth);
}

void DFlashDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    proposal.clear();
    if (request.draft_model == nullptr)
        fail(ErrorCode::invalid_argument, "the drafter dflash was asked without a draft model");
    const int root = static_cast<int>(request.tokens.size()) - 1;
    if (request.draft_model->end() != root)
        fail(ErrorCode::internal, "the draft model knows %d positions of the %d before the root",
             request.draft_model->end(), root);
    request.draft_model->propose(request.tokens.back(), proposal);
    if (width_ >= proposal.width) return;
    keep_first(proposal.table_token, proposal.depth, proposal.width, width_);
    keep_first(proposal.table_logp, proposal.depth, proposal.width, width_);
    proposal.width = width_;
}

}  // namespace kdt
