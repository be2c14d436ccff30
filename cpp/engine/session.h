// Session: one timeline of tokens. Append a prompt, begin a generation, step until it is finished; append
// again to go on.
//
// Any thread may call any session: calls of one session wait for each other, and computing calls for the
// engine's turn, in the order in which they came (engine/turns.h). A session stays one timeline: what two
// threads append to it stands there in the order of their calls.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "draft/dflash_sequence.h"
#include "draft/drafter.h"
#include "engine/budget.h"
#include "engine/executor.h"
#include "engine/repetition.h"

namespace kdt {

struct GenerateParams {
    int max_tokens = 0;
    SampleParams sample;
    std::vector<int32_t> stop_tokens;
    std::shared_ptr<Drafter> drafter;  // null: plain decoding
    int budget = -1;                   // draft nodes per round; -1: chosen by cost
    bool keep_logits = false;          // keep the logits behind each emitted token
    bool trace = false;                // keep what each round did: Session::trace
};

enum class Finish { none, stop, length, context, cancelled, error };
const char* finish_name(Finish finish);

struct StepResult {
    std::vector<int32_t> tokens;  // emitted by this step
    Finish finish = Finish::none;
    int prompt_done = 0;  // prompt tokens processed so far in this generation
    int prompt_total = 0;
    std::string error;  // with Finish::error
};

struct SessionStats {         // of one generation
    int target_forwards = 0;  // rounds, and one for the prompt however it was cut
    int rounds = 0;
    int drafted = 0;                    // nodes verified
    int accepted = 0;                   // nodes accepted and emitted
    int branching_rounds = 0;           // rounds whose path took a child that was not its parent's heaviest
    std::vector<int> accepted_lengths;  // tokens emitted per round
    struct Seconds {
        double prefill = 0, draft = 0, build = 0, verify = 0, accept = 0, commit = 0;
    } seconds;
};

// What one round did, for reports.
struct RoundTrace {
    int position = 0;                 // of the root
    Tree tree;                        // all that was built; the first `nodes` were verified
    std::vector<double> probability;  // of each node: the drafters' own
    std::vector<double> calibrated;   // as the budget took them; empty where it is fixed
    int nodes = 0;
    int asked = 0;                 // sources that drafted: kFromTable, kFromPath
    std::vector<int32_t> path;     // rows accepted, the root first
    std::vector<int32_t> emitted;  // the target's token after each of them
    double rate = 0.0;             // tokens per second that the budget reckoned with; 0 where it is fixed
    double draft_table = 0.0, draft_paths = 0.0, build = 0.0, verify = 0.0, accept = 0.0, commit = 0.0;
};

class Session {
  public:
    explicit Session(std::shared_ptr<Executor> executor);
    ~Session();
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    void append(std::span<const int32_t> tokens);
    // Appends and computes `tokens` at once; logits [tokens, vocab] after each of them. For scoring text.
    std::vector<float> score(std::span<const int32_t> tokens);
    void begin(const GenerateParams& params);
    // One prompt chunk, or one round. After a finish other than none the generation is over.
    StepResult step();
    // From another thread or a signal: the generation ends with nothing more committed; on a CPU within one
    // layer, on a device before its next round, and at once where the step still waits for its turn. A draft
    // or a measurement of costs runs to its end.
    void cancel() { cancel_.store(true, std::memory_order_relaxed); }
    // Back to the first `length` tokens.
    void rewind(int length);

    // Copies, each of one moment. They wait for a call of this session that runs or waits for its turn;
    // those of what lies on the device take a turn themselves.
    std::vector<int32_t> tokens() const;
    int committed() const;  // positions in the cache; the last emitted token is not there yet
    SessionStats stats() const;
    std::vector<float> logits(size_t first = 0) const;  // [emitted - first, vocab], from token `first` on
    // Of the last round; empty before the first and without GenerateParams::trace.
    std::optional<RoundTrace> trace() const;
    std::vector<float> cache(int layer) const;  // on the device
    // Of the draft model: positions that it has keys of, and those whose taps it has. Zeros where the engine
    // has none.
    std::pair<int, int> draft_positions() const;
    // On the device, for tests; errors where the engine has no draft model: keys and values of a layer, the
    // first `count` features of the last batch, the logits of the last draft.
    std::vector<float> draft_cache(int layer) const;
    std::vector<float> draft_features(int count) const;
    std::vector<float> draft_logits() const;
    // One forward over any rows, for tests: see Executor::run_rows.
    void run_rows(std::span<const RowSpec> rows, std::span<const int32_t> want_logits,
                  std::span<const int32_t> want_taps, const std::vector<int>& tap_layers,
                  std::vector<float>& logits, std::vector<float>& taps);

    const Engine& engine() const { return executor_->engine(); }

  private:
    // The calls without their turns.
    void extend(std::span<const int32_t> tokens);
    void back_to(int length);
    const DFlashRunner& draft_runner() const;

    StepResult prefill_chunk();
    StepResult round();
    // Asks the drafters of `asked` sources; seconds by source.
    std::array<double, 2> draft(int asked, int max_depth, Proposal& proposal);
    int ask(int available);  // which sources to ask next
    void time_drafts(int available, int max_depth);
    void begin_next_draft(int available);
    // What this generation's drafts have brought, to the engine, once. With the turn.
    void leave_record();
    // Appends what was emitted and says whether, and why, the generation ends here.
    void emit(std::span<const int32_t> tokens, bool failed, StepResult& result);

    std::shared_ptr<Executor> executor_;
    mutable Turns calls_;  // of this session; taken before the engine's
    int sequence_;
    std::vector<int32_t> tokens_;
    int committed_ = 0;
    std::atomic<bool> cancel_{false};

    bool generating_ = false;
    GenerateParams params_;
    std::vector<Drafter*> drafters_;  // the parts of params_.drafter
    bool feeds_draft_model_ = false;  // the target's taps are kept for the draft model
    std::optional<DFlashSequence> draft_model_;
    Budget budget_{0};
    Repetition repetition_;
    std::string budget_of_;  // the drafter that it has learned about
    bool learned_ = false;   // since the engine was told
    int next_asked_ = -1;    // sources of the next round, where its draft was begun; -1: not decided
    double begin_seconds_ = 0.0;
    std::optional<RoundTrace> trace_;
    int emitted_ = 0;
    int prompt_first_ = 0, prompt_total_ = 0;
    SessionStats stats_;
    std::vector<float> kept_logits_;
};

}  // namespace kdt
