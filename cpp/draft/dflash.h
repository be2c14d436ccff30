// Runs a DFlash draft model (Chen, Liang, Liu, arXiv 2602.06036) for the sequences of one executor.
//
// A committed position t has a feature c_t = hidden_norm(fc(taps of the target at t)); every draft layer
// turns it, as it is, into a key and a value at position t: computed once, in the target's pages. A draft
// runs the block [root, MASK, MASK, ...] at the positions after them: each layer's queries see all committed
// positions (of its window) and the block; the target's head reads the masks' rows. The row of a mask at
// position p proposes the token at p; the root's row proposes nothing.
//
// Every op is row-pure, so a feature, a key and a proposal are the same bits however positions were batched.
#pragma once

#include <array>
#include <memory>
#include <span>
#include <vector>

#include "backend/backend.h"
#include "backend/staging.h"
#include "draft/dflash_weights.h"
#include "draft/drafter.h"

namespace kdt {

// The executor's side of a draft model's memory.
struct DFlashPlace {
    const int32_t* page_table = nullptr;  // on the device, [sequences, pages_per_sequence]
    int page_count = 0, pages_per_sequence = 0;
    int sequences = 0;
    int context = 0;  // positions of a sequence at most
    int rows = 0;     // of the largest forward whose taps are fed
};

class DFlashRunner {
  public:
    // Taps of a sequence that may wait: two of the largest rounds.
    static constexpr int kKeptRows = 2 * kMaxTreeRows;

    DFlashRunner(Backend& backend, const DFlashModel& model, const DFlashPlace& place);
    // What the constructor allocates, but for small arrays.
    static size_t bytes(const DFlashConfig& config, const DFlashPlace& place, size_t cache_element);

    const DFlashConfig& config() const { return model_.config; }

    // [rows, tap_width]: where the target's forward writes its taps.
    float* taps() const { return taps_.as<float>(); }
    // [sequences * kKeptRows, tap_width]: where taps wait; rows sequence * kKeptRows + i are the sequence's.
    float* kept() const { return kept_.as<float>(); }
    int kept_capacity() const { return place_.sequences * kKeptRows; }

    // Features, keys and values of positions first .. first + count - 1 of a sequence, from rows 0 .. count -
    // 1 of `taps`, or of the sequence's kept rows. Its pages must be there.
    void feed_taps(int sequence, int first, int count);
    void feed_kept(int sequence, int first, int count);
    // Proposes after `root`, at position `start`; positions 0 .. start - 1 must have been fed. What `begin`
    // queued for the same three is read instead of drafted again.
    void draft(int sequence, int start, int32_t root, Proposal& proposal);
    // Queues that draft and does not wait for it.
    void begin(int sequence, int start, int32_t root);
    // The positions of a sequence are no longer what they were when its draft began.
    void forget(int sequence) {
        if (begun_.sequence == sequence) begun_.sequence = -1;
    }

    // Read-backs, for tests: features [count, hidden] of the last feed's first rows; logits [drafts, vocab]
    // of the last draft; entries [positions, 2, kv_heads, head_dim] of one layer.
    std::vector<float> features(int count) const;
    std::vector<float> logits() const;
    std::vector<float> cache(int layer, std::span<const int32_t> pages, int positions) const;

  private:
    // Sizes of recorded feeds: rows in between ride as padding.
    static constexpr std::array<int, 12> kFeedSizes = {1, 2, 3, 4, 6, 8, 12, 17, 33, 65, 97, kKeptRows};

    // Host memory that is being uploaded must not change before the device has read it.
    void wait_for(bool uploading);
    void stage_feed(int sequence, int first, int count, bool from_kept);
    void queue_feed(int capacity, bool from_kept);
    void queue_draft();
    DraftCache cache(int layer) const;

    Backend& backend_;
    const DFlashModel& model_;
    const DFlashPlace place_;
    RopeTable rope_;

    Buffer pages_, block_, rope_cos_, rope_sin_, taps_, kept_;
    Buffer feature_, k_, v_;      // of a feed: [rows, hidden], [rows, key_width] twice
    Buffer x_, h_, q_, o_, act_;  // of a block: [block_rows, ...]
    Buffer logits_;               // [drafts, vocab]
    Staging feed_in_, block_in_, out_;
    struct FeedOffsets {
        size_t live, sequence, position, index;
    } feed_;
    struct BlockOffsets {
        size_t rows, drafts, sequence, start, token, position;
    } in_;
    struct OutputOffsets {
        size_t token, logp;
    } table_;
    int table_width_;
    std::array<std::unique_ptr<Graph>, kFeedSizes.size()> feed_graphs_;
    std::unique_ptr<Graph> draft_graph_;
    bool feed_uploading_ = false, block_uploading_ = false;
    struct Begun {
        int sequence = -1, start = 0;
        int32_t root = 0;
        bool operator==(const Begun&) const = default;
    } begun_;  // the draft whose table is, or will be, on the device
};

}  // namespace kdt
