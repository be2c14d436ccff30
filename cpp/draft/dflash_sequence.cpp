#include "draft/dflash_sequence.h"

#include <algorithm>

#include "core/error.h"

namespace kdt {

void DFlashSequence::rewind(int length) {
    runner_->forget(sequence_);
    if (length >= end()) return;
    ready_ = std::min(ready_, length);
    waiting_ = length - ready_;
}

void DFlashSequence::settle() {
    runner_->feed_kept(sequence_, ready_, waiting_);
    ready_ += waiting_;
    waiting_ = 0;
}

void DFlashSequence::feed_prompt(int count) {
    if (waiting_ > 0) fail(ErrorCode::internal, "%d taps still wait before a prompt's", waiting_);
    runner_->feed_taps(sequence_, ready_, count);
    ready_ += count;
}

int DFlashSequence::make_room(int count) {
    if (count > DFlashRunner::kKeptRows)
        fail(ErrorCode::internal, "%d taps cannot wait; %d at most", count, DFlashRunner::kKeptRows);
    if (waiting_ + count > DFlashRunner::kKeptRows) settle();
    return sequence_ * DFlashRunner::kKeptRows + waiting_;
}

void DFlashSequence::begin(int32_t root) {
    settle();
    runner_->begin(sequence_, ready_, root);
}

void DFlashSequence::propose(int32_t root, Proposal& proposal) {
    settle();
    runner_->draft(sequence_, ready_, root, proposal);
}

}  // namespace kdt
