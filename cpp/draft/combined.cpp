#include "draft/combined.h"

#include <iterator>

#include "core/error.h"

namespace kdt {

void Proposal::merge(Proposal&& other) {
    if (other.depth > 0) {
        if (depth > 0) fail(ErrorCode::invalid_argument, "two drafters propose a table; a tree takes one");
        depth = other.depth;
        width = other.width;
        table_token = std::move(other.table_token);
        table_logp = std::move(other.table_logp);
    }
    paths.insert(paths.end(), std::make_move_iterator(other.paths.begin()),
                 std::make_move_iterator(other.paths.end()));
}

CombinedDrafter::CombinedDrafter(std::vector<std::shared_ptr<Drafter>> drafters)
    : drafters_(std::move(drafters)) {
    if (drafters_.empty()) fail(ErrorCode::invalid_argument, "no drafters to combine");
    int tables = 0;
    for (const std::shared_ptr<Drafter>& d : drafters_) {
        if (!d) fail(ErrorCode::invalid_argument, "one of the drafters to combine is missing");
        tables += (d->sources() & kFromTable) != 0;
    }
    if (tables > 1)
        fail(ErrorCode::invalid_argument, "%d of the drafters propose a table; a tree takes one", tables);
}

std::string CombinedDrafter::name() const {
    std::string names;
    for (const std::shared_ptr<Drafter>& d : drafters_) {
        if (!names.empty()) names += '+';
        names += d->name();
    }
    return names;
}

int CombinedDrafter::sources() const {
    int bits = 0;
    for (const std::shared_ptr<Drafter>& d : drafters_) bits |= d->sources();
    return bits;
}

bool CombinedDrafter::uses_draft_model() const {
    for (const std::shared_ptr<Drafter>& d : drafters_)
        if (d->uses_draft_model()) return true;
    return false;
}

void CombinedDrafter::propose(const DraftRequest& request, Proposal& proposal) {
    proposal.clear();
    Proposal part;
    for (const std::shared_ptr<Drafter>& d : drafters_) {
        d->propose(request, part);
        proposal.merge(std::move(part));
    }
}

void CombinedDrafter::parts(std::vector<Drafter*>& out) {
    for (const std::shared_ptr<Drafter>& d : drafters_) d->parts(out);
}

}  // namespace kdt
