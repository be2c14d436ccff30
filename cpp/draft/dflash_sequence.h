// What the draft model knows of one session: which positions it has keys of, and which taps still wait.
//
// Positions 0 .. ready - 1 have keys and values; the taps of the `waiting` positions after them lie in the
// runner's kept rows, and become features, keys and values in one batch before the next draft (or when their
// room runs out). Positions behind are not known: the session runs them through the target again before it
// drafts.
#pragma once

#include "draft/dflash.h"

namespace kdt {

class DFlashSequence {
  public:
    DFlashSequence(DFlashRunner& runner, int sequence) : runner_(&runner), sequence_(sequence) {
        runner_->forget(sequence_);
    }

    int end() const { return ready_ + waiting_; }
    int ready() const { return ready_; }
    // Forgets positions from `length` on. Their entries are written again before anyone reads them.
    void rewind(int length);
    // Turns the taps that wait into keys and values. A prompt's chunk needs it before its forward, whose taps
    // take the same room.
    void settle();
    // Rows 0 .. count - 1 of the runner's taps are the next positions: a prompt's chunk.
    void feed_prompt(int count);
    // Makes room for up to `count` rows; the row of the runner's kept taps where the first one goes.
    int make_room(int count);
    // `count` rows were put there.
    void kept(int count) { waiting_ += count; }
    // Proposes after `root`, which stands at position end(). `begin` does all of it but waiting: a device
    // then drafts while the host does something else.
    void propose(int32_t root, Proposal& proposal);
    void begin(int32_t root);

    DFlashRunner& runner() const { return *runner_; }

  private:
    DFlashRunner* runner_;
    int sequence_;
    int ready_ = 0, waiting_ = 0;
};

}  // namespace kdt
