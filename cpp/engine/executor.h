// Executor: the memory in which sessions of one engine live (KV pages, tree scratch, activations), and the
// one place that runs forwards. Everything is allocated at creation, after the sum has been compared with
// what the device has.
//
// Making and destroying an executor take the engine's turn. Everything else is for whoever has it (sessions
// see to that), but for the numbers that never change.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "backend/staging.h"
#include "ddtree/tree.h"
#include "draft/dflash.h"
#include "engine/budget.h"
#include "engine/engine.h"
#include "model/forward.h"

namespace kdt {

struct ExecutorOptions {
    int context = 0;       // positions of one sequence at most; 0: the smaller of the model's limit and 8192
    int sessions = 1;      // sequences that may be open at once
    int prefill_rows = 0;  // rows of a prompt chunk; 0: 256
};

// A row as the host describes it (law 3). Prompt rows leave `ancestors` empty.
struct RowSpec {
    int32_t token = 0;
    int32_t position = 0;
    int32_t prefix = 0;
    std::vector<int32_t> ancestors;  // rows of this batch, root first, the row itself last
};

class Executor {
  public:
    Executor(std::shared_ptr<const Engine> engine, const ExecutorOptions& options);
    ~Executor();

    const Engine& engine() const { return *engine_; }
    int context() const { return context_; }
    int prefill_rows() const { return prefill_rows_; }
    size_t bytes() const { return bytes_; }
    // Runs the engine's draft model; null where it has none.
    DFlashRunner* draft_runner() const { return draft_runner_.get(); }

    bool vacant() const;  // whether another sequence can be opened
    // Sequences and their pages. Pages are taken as positions are needed and given back on shrink and close.
    int open_sequence();
    void close_sequence(int sequence);
    void reserve(int sequence, int positions);
    void shrink(int sequence, int positions);

    // Prompt rows: tokens at positions first, first + 1, … of the sequence; their pages must be reserved.
    // Logits are kept for the last `logit_rows` of them; `taps`: all of them leave taps with the draft
    // runner. Returns false when cancelled.
    bool run_prompt(int sequence, std::span<const int32_t> tokens, int first, int logit_rows, bool taps,
                    const std::atomic<bool>* cancel);

    // Any rows, for tests and for probing costs: logits and taps of every row that asks.
    void run_rows(int sequence, std::span<const RowSpec> rows, std::span<const int32_t> want_logits,
                  std::span<const int32_t> want_taps, const std::vector<int>& tap_layers,
                  std::vector<float>& logits, std::vector<float>& taps);

    // The stages of a round. `build` makes the tree of a host proposal. `verify` uploads it and queues
    // everything from the forward to the commit, without a read-back in between; `walk` is the one read-back.
    const Tree& build(int32_t root, const Proposal& proposal, int budget, int max_depth);
    struct VerifyRequest {
        int sequence = 0;
        int start = 0;  // committed length: position of the root
        int nodes = 0;  // of the tree, in pop order
        int limit = 1;  // tokens that may still be emitted
        std::span<const int32_t> stops;
        SampleParams sample;
        int kept_row = -1;  // of the draft runner's kept taps: those of the path go there; -1: nowhere
        const std::atomic<bool>* cancel = nullptr;
    };
    bool verify(const VerifyRequest& request);  // false when cancelled: nothing was committed
    struct Walk {
        std::vector<int32_t> path;     // rows committed, root first
        std::vector<int32_t> emitted;  // the token after each of them
        bool failed = false;           // no token could be chosen after the next row
        bool recorded = false;         // the round's ops were recorded first: its seconds say little
        bool branched = false;         // the path took a child that is not its parent's heaviest
        // Of the stages. Where ops are queued, waiting for all of them counts as verify.
        struct Seconds {
            double verify = 0, accept = 0, commit = 0;
        } seconds;
    };
    Walk walk();
    // After `run_prompt` with one logit row: the token that the target emits at the end of the prompt chunk
    // of `rows` rows.
    int32_t select_last(const SampleParams& sample, int rows);

    // Fills the engine's cost table from rounds of the kind that follows, over distinct rows of a sequence's
    // own text: siblings below a root at position `start`, which see what is committed. Nothing may be
    // emitted, so nothing is committed: they write to scratch alone.
    void measure_costs(int sequence, int start, std::span<const int32_t> text, bool taps);

    std::vector<float> logits(int row) const;                                // [vocab] of the last forward
    std::vector<float> cache(int sequence, int layer, int positions) const;  // [positions, latent + rope]
    // [positions, 2, kv_heads, head_dim] of the draft model.
    std::vector<float> draft_cache(int sequence, int layer, int positions) const;

  private:
    void stage_round();  // lays out what a round is told and what it tells
    void load_page_table(int sequence);
    ForwardArgs forward_args(int capacity);
    void want_taps(ForwardArgs& args) const;
    bool run(const ForwardArgs& args);
    // The ops of a round from tree rows to commit, for at most `capacity` rows; recorded once per capacity.
    void queue_round(int capacity, bool taps);
    Graph* round_graph(int rows, bool taps);  // null when cancelled while recording
    bool launch_round(int nodes, bool taps, const std::atomic<bool>* cancel);
    void upload_rows(int sequence, std::span<const RowSpec> rows);
    void check_forwardable(std::span<const RowSpec> rows) const;

    std::shared_ptr<const Engine> engine_;
    // Held while the constructor runs and from the destructor on: what is declared below is taken and given
    // back within a turn.
    std::unique_lock<Turns> turn_;
    Backend& backend_;
    int context_, sessions_, prefill_rows_, max_rows_, pages_per_sequence_, page_count_;
    size_t bytes_ = 0;

    std::vector<int32_t> free_pages_;
    std::vector<std::vector<int32_t>> sequence_pages_;  // per sequence, in order of position
    std::vector<bool> sequence_open_;

    Buffer pages_, scratch_kv_, page_table_, rope_cos_, rope_sin_, logits_;
    std::vector<LatentCache> caches_;
    std::unique_ptr<ForwardScratch> activations_;

    // Row batch, tree and walk on the device.
    Buffer token_, sequence_, position_, prefix_, ancestor_count_, ancestors_, live_, logit_index_,
        logit_live_;
    Buffer tap_index_, tap_live_;
    Buffer selected_;
    // What a round is told and what it tells: one upload, one read-back.
    Staging round_in_, round_out_;
    struct InputOffsets {
        size_t start, nodes, sequence, limit, stop_count, stops, sample, kept_row, count, token, parent,
            depth, source, weight;
    } in_;
    struct OutputOffsets {
        size_t length, failed, path, emitted;
    } out_;
    RowBatch batch_;
    TreeArrays tree_;
    RopeTable rope_;
    std::unique_ptr<DFlashRunner> draft_runner_;
    std::array<std::unique_ptr<Graph>, CostTable::kSizes.size()> round_graphs_[2];  // without and with taps
    const std::atomic<bool>* cancel_ = nullptr;                                     // of the running request
    bool was_cancelled_ = false, recorded_ = false;
    Walk::Seconds stage_seconds_;
    Tree host_tree_;
};

}  // namespace kdt
