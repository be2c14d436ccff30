#include "engine/session.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "engine/stopwatch.h"

namespace kdt {

namespace {

constexpr double kShortDraft = 0.05;  // seconds: a draft that may be made twice to be timed

}  // namespace

const char* finish_name(Finish finish) {
    switch (finish) {
        case Finish::none:
            return "none";
        case Finish::stop:
            return "stop";
        case Finish::length:
            return "length";
        case Finish::context:
            return "context";
        case Finish::cancelled:
            return "cancelled";
        case Finish::error:
            return "error";
    }
    return "?";
}

Session::Session(std::shared_ptr<Executor> executor) : executor_(std::move(executor)) {
    const std::lock_guard turn(engine().turns());
    sequence_ = executor_->open_sequence();
    if (executor_->draft_runner() != nullptr) draft_model_.emplace(*executor_->draft_runner(), sequence_);
}

Session::~Session() {
    const std::lock_guard turn(engine().turns());
    leave_record();
    executor_->close_sequence(sequence_);
}

void Session::append(std::span<const int32_t> tokens) {
    const std::lock_guard call(calls_);
    extend(tokens);
}

void Session::extend(std::span<const int32_t> tokens) {
    const int vocab = engine().config().vocab_size;
    for (size_t i = 0; i < tokens.size(); ++i)
        if (tokens[i] < 0 || tokens[i] >= vocab)
            fail(ErrorCode::invalid_argument, "token %zu is %d, outside the vocabulary of %d", i, tokens[i],
                 vocab);
    const size_t total = tokens_.size() + tokens.size();
    if (total >= static_cast<size_t>(executor_->context()))
        fail(ErrorCode::out_of_memory,
             "the prompt makes %zu tokens and the context holds %d: there is no room for an answer", total,
             executor_->context());
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    generating_ = false;
}

std::vector<float> Session::score(std::span<const int32_t> tokens) {
    const std::lock_guard call(calls_);
    const size_t before = tokens_.size();
    extend(tokens);
    const size_t vocab = engine().config().vocab_size;
    std::vector<float> logits;
    logits.reserve(tokens.size() * vocab);
    const int total = static_cast<int>(tokens_.size());
    cancel_.store(false);
    // A turn each chunk: a long text keeps no other session waiting for all of it.
    while (committed_ < total) {
        const int n = std::min({executor_->prefill_rows(), kMaxTreeRows, total - committed_});
        std::unique_lock<Turns> turn;
        if (engine().turns().lock_unless(cancel_)) turn = std::unique_lock(engine().turns(), std::adopt_lock);
        if (turn) executor_->reserve(sequence_, committed_ + n);
        if (!turn || !executor_->run_prompt(sequence_, {tokens_.data() + committed_, static_cast<size_t>(n)},
                                            committed_, n, false, &cancel_)) {
            tokens_.resize(std::max<size_t>(before, committed_));
            if (repetition_.seen() > tokens_.size()) repetition_ = {};
            fail(ErrorCode::invalid_argument, "cancelled while scoring");
        }
        for (int i = 0; i < n; ++i) {
            if (static_cast<size_t>(committed_ + i) < before) continue;
            const std::vector<float> row = executor_->logits(i);
            logits.insert(logits.end(), row.begin(), row.end());
        }
        committed_ += n;
    }
    return logits;
}

void Session::begin(const GenerateParams& params) {
    if (params.max_tokens < 1)
        fail(ErrorCode::invalid_argument, "max_tokens is %d; expected at least 1", params.max_tokens);
    if (params.budget < -1 || params.budget > kMaxNodes)
        fail(ErrorCode::invalid_argument, "budget is %d; expected auto (-1) or 0 to %d", params.budget,
             kMaxNodes);
    const std::lock_guard call(calls_);
    const std::lock_guard turn(engine().turns());
    const SampleParams& s = params.sample;
    if (!(s.temperature >= 0.0f && s.temperature < HUGE_VALF))
        fail(ErrorCode::invalid_argument, "temperature is %g; expected 0 (greedy) or more",
             static_cast<double>(s.temperature));
    if (s.top_k < 0) fail(ErrorCode::invalid_argument, "top_k is %d; expected 0 (off) or more", s.top_k);
    if (!(s.top_p > 0.0f && s.top_p <= 1.0f))
        fail(ErrorCode::invalid_argument, "top_p is %g; expected more than 0 and at most 1 (off)",
             static_cast<double>(s.top_p));
    if (!(s.min_p >= 0.0f && s.min_p <= 1.0f))
        fail(ErrorCode::invalid_argument, "min_p is %g; expected 0 (off) to 1", static_cast<double>(s.min_p));
    if (params.stop_tokens.size() > static_cast<size_t>(kMaxStops))
        fail(ErrorCode::invalid_argument, "%zu stop tokens; expected at most %d", params.stop_tokens.size(),
             kMaxStops);
    if (tokens_.empty())
        fail(ErrorCode::invalid_argument, "the prompt is empty: there is no token to continue from");
    if (tokens_.size() >= static_cast<size_t>(executor_->context()))
        fail(ErrorCode::out_of_memory,
             "the session holds %zu tokens and the context %d: there is no room for an answer",
             tokens_.size(), executor_->context());

    const bool feeds = params.drafter && params.drafter->uses_draft_model();
    if (feeds && !draft_model_)
        fail(ErrorCode::invalid_argument, "the drafter %s needs a draft model, and the engine has none",
             params.drafter->name().c_str());

    // All of the prompt may be in the cache already (after `score`): its last token must be run again for its
    // logits.
    committed_ = std::min<int>(committed_, static_cast<int>(tokens_.size()) - 1);
    params_ = params;
    drafters_.clear();
    if (params_.drafter) params_.drafter->parts(drafters_);
    // The draft model sees the same positions as the target: what it has not seen, or what is about to be
    // replaced, runs through the target again. Row purity makes the bits of the latents the same.
    feeds_draft_model_ = feeds;
    if (draft_model_) draft_model_->rewind(committed_);
    if (feeds) committed_ = draft_model_->end();
    leave_record();
    const std::string budget_of = params.drafter ? params.drafter->name() : "";
    const int fixed = params.drafter ? params.budget : 0;
    if (budget_.fixed() != fixed || budget_of != budget_of_)
        budget_ = Budget(fixed, engine().draft_record(budget_of), params.max_tokens);
    budget_of_ = budget_of;
    trace_.reset();
    next_asked_ = -1;
    begin_seconds_ = 0.0;
    emitted_ = 0;
    prompt_first_ = committed_;
    prompt_total_ = static_cast<int>(tokens_.size()) - committed_;
    stats_ = SessionStats{};
    kept_logits_.clear();
    cancel_.store(false);
    generating_ = true;
}

StepResult Session::step() {
    const std::lock_guard call(calls_);
    if (!generating_) fail(ErrorCode::invalid_argument, "there is no generation to step: call begin first");
    StepResult result;
    if (engine().turns().lock_unless(cancel_)) {
        const std::lock_guard turn(engine().turns(), std::adopt_lock);
        result = emitted_ == 0 ? prefill_chunk() : round();
        if (result.finish != Finish::none) leave_record();
    } else {
        result.finish = Finish::cancelled;
    }
    result.prompt_total = prompt_total_;
    result.prompt_done = std::min(committed_ - prompt_first_, prompt_total_);
    if (result.finish != Finish::none) generating_ = false;
    return result;
}

// One chunk of the prompt; the last one also emits the first token. Tokens go straight to their pages.
StepResult Session::prefill_chunk() {
    StepResult result;
    Stopwatch watch;
    const int left = static_cast<int>(tokens_.size()) - committed_;
    const int n = std::min(left, executor_->prefill_rows());
    const bool last = n == left;
    executor_->reserve(sequence_, committed_ + n);
    if (stats_.target_forwards == 0) stats_.target_forwards = 1;
    if (feeds_draft_model_) draft_model_->settle();
    if (!executor_->run_prompt(sequence_, {tokens_.data() + committed_, static_cast<size_t>(n)}, committed_,
                               last ? 1 : 0, feeds_draft_model_, &cancel_)) {
        result.finish = Finish::cancelled;
        return result;
    }
    if (feeds_draft_model_) draft_model_->feed_prompt(n);
    if (last) {
        const int32_t token = executor_->select_last(params_.sample, n);
        const bool failed = token < 0;
        if (params_.keep_logits && !failed) kept_logits_ = executor_->logits(0);
        committed_ += n;
        emit({&token, failed ? 0u : 1u}, failed, result);
    } else {
        committed_ += n;
    }
    stats_.seconds.prefill += watch.lap();
    return result;
}

std::array<double, 2> Session::draft(int asked, int max_depth, Proposal& proposal) {
    std::array<double, 2> seconds{};
    DraftRequest request{tokens_, max_depth, draft_model_ ? &*draft_model_ : nullptr};
    for (Drafter* drafter : drafters_) {
        if (!(drafter->sources() & asked)) continue;
        Stopwatch watch;
        Proposal part;
        drafter->propose(request, part);
        proposal.merge(std::move(part));
        seconds[drafter->sources() & kFromTable ? 0 : 1] += watch.lap();
    }
    return seconds;
}

int Session::ask(int available) {
    if (budget_.automatic()) repetition_.see(tokens_);
    return budget_.sources(available, engine().costs(), repetition_.share());
}

// Before the first draft is paid for: what one of each source takes, the second time where that is short.
void Session::time_drafts(int available, int max_depth) {
    for (const int bit : {kFromTable, kFromPath}) {
        if (!(available & bit) || budget_.draft_timed(bit)) continue;
        for (int time = 0; time < 2; ++time) {
            Proposal proposal;
            const std::array<double, 2> seconds = draft(bit, max_depth, proposal);
            const double took = seconds[bit == kFromTable ? 0 : 1];
            if (time == 0 && took < kShortDraft) continue;
            budget_.expect_draft(bit, took);
            break;
        }
    }
}

// draft -> build -> verify -> accept -> commit
StepResult Session::round() {
    StepResult result;
    trace_.reset();
    Stopwatch watch;
    const int start = committed_;  // position of the root
    const int context = executor_->context();
    // A node at depth d emits the token at position start + d + 1, which must exist.
    const int max_depth = std::max(0, context - 2 - start);
    executor_->reserve(sequence_, std::min(context, start + kMaxTreeRows));
    CostTable& costs = engine().costs();
    const int available = params_.drafter && max_depth > 0 ? params_.drafter->sources() : 0;
    if (available && budget_.automatic() && costs.plain_known()) {
        if (!costs.measured()) executor_->measure_costs(sequence_, start, tokens_, feeds_draft_model_);
        time_drafts(available, max_depth);
    }
    // Who is asked may have been decided, and the draft begun, at the end of the last round.
    const int asked = next_asked_ >= 0 ? next_asked_ : available ? ask(available) : 0;
    next_asked_ = -1;

    Proposal proposal;
    std::array<double, 2> draft_seconds = draft(asked, max_depth, proposal);
    draft_seconds[0] += begin_seconds_;
    begin_seconds_ = 0.0;
    watch.lap();
    const Tree& tree = executor_->build(tokens_.back(), proposal, budget_.max_nodes(), max_depth);
    const TreeView view{tree.token, tree.parent, tree.source, tree.weight};
    const int nodes = budget_.choose(view, costs);
    const double build_seconds = watch.lap();

    Executor::VerifyRequest request;
    request.sequence = sequence_;
    request.start = start;
    request.nodes = nodes;
    request.limit = std::min(params_.max_tokens - emitted_, context - static_cast<int>(tokens_.size()));
    request.stops = params_.stop_tokens;
    request.sample = params_.sample;
    request.cancel = &cancel_;
    if (feeds_draft_model_) request.kept_row = draft_model_->make_room(nodes + 1);
    watch.lap();
    if (!executor_->verify(request)) {
        result.finish = Finish::cancelled;
        return result;
    }
    const Executor::Walk walk = executor_->walk();
    const double target_seconds = watch.lap();
    const int kept = static_cast<int>(walk.emitted.size());
    committed_ = start + kept;
    if (feeds_draft_model_) draft_model_->kept(kept);
    emit(walk.emitted, walk.failed, result);
    if (params_.keep_logits) {
        for (const int32_t row : walk.path) {
            const std::vector<float> logits = executor_->logits(row);
            kept_logits_.insert(kept_logits_.end(), logits.begin(), logits.end());
        }
    }

    ++stats_.rounds;
    ++stats_.target_forwards;
    stats_.drafted += nodes;
    stats_.accepted += std::max(0, kept - 1);
    stats_.branching_rounds += walk.branched;
    stats_.accepted_lengths.push_back(kept);
    stats_.seconds.draft += draft_seconds[0] + draft_seconds[1];
    stats_.seconds.build += build_seconds;
    stats_.seconds.verify += walk.seconds.verify;
    stats_.seconds.accept += walk.seconds.accept;
    stats_.seconds.commit += walk.seconds.commit;
    if (params_.trace) {
        trace_.emplace();
        trace_->position = start;
        trace_->tree = tree;
        for (const double weight : tree.weight) trace_->probability.push_back(std::exp(weight));
        if (budget_.automatic()) {
            const auto p = budget_.probabilities(view);
            trace_->calibrated.assign(p.begin(), p.begin() + tree.weight.size());
            trace_->rate = budget_.rate(costs);
        }
        trace_->nodes = nodes;
        trace_->asked = asked;
        trace_->path = walk.path;
        trace_->emitted = walk.emitted;
        trace_->draft_table = draft_seconds[0];
        trace_->draft_paths = draft_seconds[1];
        trace_->build = build_seconds;
        trace_->verify = walk.seconds.verify;
        trace_->accept = walk.seconds.accept;
        trace_->commit = walk.seconds.commit;
    }
    if (budget_.automatic()) {
        if (!walk.recorded) costs.observe(nodes, walk.seconds.verify);
        RoundOutcome outcome;
        outcome.tree = view;
        outcome.nodes = nodes;
        outcome.path = walk.path;
        outcome.emitted = walk.emitted;
        outcome.asked = asked;
        // The tree is part of what a draft costs.
        if (asked) draft_seconds[asked & kFromTable ? 0 : 1] += build_seconds;
        outcome.draft = draft_seconds;
        outcome.seconds = walk.recorded ? costs.seconds(nodes) : target_seconds;
        budget_.observe(outcome, costs);
        learned_ = true;
    }
    if (result.finish == Finish::none && available) begin_next_draft(available);
    return result;
}

// A device drafts while the host reads what this round emitted. Where ops run at once there is nothing to
// gain, and an answer that ends here would have paid for nothing. With a trace, a round's seconds are its
// own.
void Session::begin_next_draft(int available) {
    const CostTable& costs = engine().costs();
    if (!feeds_draft_model_ || params_.trace || !engine().backend().queues()) return;
    if (budget_.automatic() && !(costs.measured() && budget_.draft_timed(kFromTable))) return;
    if (executor_->context() - 2 - committed_ <= 0) return;
    next_asked_ = ask(available);
    if (!(next_asked_ & kFromTable)) return;
    Stopwatch watch;
    try {
        draft_model_->begin(tokens_.back());
    } catch (const std::exception&) {
        // What was emitted must reach the caller, whatever becomes of a draft that nobody has asked for yet:
        // the next round begins it again, and says what is wrong.
    }
    begin_seconds_ = watch.lap();
}

void Session::emit(std::span<const int32_t> tokens, bool failed, StepResult& result) {
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    result.tokens.assign(tokens.begin(), tokens.end());
    emitted_ += static_cast<int>(tokens.size());
    const auto& stops = params_.stop_tokens;
    if (failed) {
        result.finish = Finish::error;
        result.error = format("the logits after token %zu hold NaN or no finite value", tokens_.size() - 1);
    } else if (std::find(stops.begin(), stops.end(), tokens_.back()) != stops.end()) {
        result.finish = Finish::stop;
    } else if (emitted_ >= params_.max_tokens) {
        result.finish = Finish::length;
    } else if (tokens_.size() >= static_cast<size_t>(executor_->context())) {
        result.finish = Finish::context;
    }
}

void Session::rewind(int length) {
    const std::lock_guard call(calls_);
    const std::lock_guard turn(engine().turns());
    back_to(length);
}

void Session::leave_record() {
    if (learned_) engine().draft_record(budget_of_) = budget_.record();
    learned_ = false;
}

void Session::back_to(int length) {
    if (length < 0 || static_cast<size_t>(length) > tokens_.size())
        fail(ErrorCode::invalid_argument, "rewind to %d tokens; the session holds %zu", length,
             tokens_.size());
    leave_record();
    tokens_.resize(length);
    if (repetition_.seen() > tokens_.size()) repetition_ = {};
    committed_ = std::min(committed_, length);
    if (draft_model_) draft_model_->rewind(committed_);
    executor_->shrink(sequence_, committed_);
    generating_ = false;
}

// ------------------------------------------------------------------------------------------------------------
// reading

std::vector<int32_t> Session::tokens() const {
    const std::lock_guard call(calls_);
    return tokens_;
}

int Session::committed() const {
    const std::lock_guard call(calls_);
    return committed_;
}

SessionStats Session::stats() const {
    const std::lock_guard call(calls_);
    return stats_;
}

std::vector<float> Session::logits(size_t first) const {
    const std::lock_guard call(calls_);
    const size_t vocab = static_cast<size_t>(engine().config().vocab_size);
    const size_t from = std::min(first, kept_logits_.size() / vocab) * vocab;
    return {kept_logits_.begin() + static_cast<std::ptrdiff_t>(from), kept_logits_.end()};
}

std::optional<RoundTrace> Session::trace() const {
    const std::lock_guard call(calls_);
    return trace_;
}

std::vector<float> Session::cache(int layer) const {
    const std::lock_guard call(calls_);
    const std::lock_guard turn(engine().turns());
    return executor_->cache(sequence_, layer, committed_);
}

std::pair<int, int> Session::draft_positions() const {
    const std::lock_guard call(calls_);
    return draft_model_ ? std::pair(draft_model_->ready(), draft_model_->end()) : std::pair(0, 0);
}

const DFlashRunner& Session::draft_runner() const {
    if (!draft_model_) fail(ErrorCode::invalid_argument, "the engine has no draft model");
    return draft_model_->runner();
}

std::vector<float> Session::draft_cache(int layer) const {
    const std::lock_guard call(calls_);
    const int layers = draft_runner().config().num_hidden_layers;
    if (layer < 0 || layer >= layers)
        fail(ErrorCode::invalid_argument, "layer %d; the draft model has layers 0 to %d", layer, layers - 1);
    const std::lock_guard turn(engine().turns());
    return executor_->draft_cache(sequence_, layer, draft_model_->ready());
}

std::vector<float> Session::draft_features(int count) const {
    const std::lock_guard call(calls_);
    const std::lock_guard turn(engine().turns());
    return draft_runner().features(count);
}

std::vector<float> Session::draft_logits() const {
    const std::lock_guard call(calls_);
    const std::lock_guard turn(engine().turns());
    return draft_runner().logits();
}

void Session::run_rows(std::span<const RowSpec> rows, std::span<const int32_t> want_logits,
                       std::span<const int32_t> want_taps, const std::vector<int>& tap_layers,
                       std::vector<float>& logits, std::vector<float>& taps) {
    const std::lock_guard call(calls_);
    for (const RowSpec& r : rows)
        if (!r.ancestors.empty() ? r.prefix > committed_
                                 : r.position > committed_ + static_cast<int>(rows.size()))
            fail(ErrorCode::invalid_argument, "a row sees %d positions and %d are committed", r.prefix,
                 committed_);
    const std::lock_guard turn(engine().turns());
    executor_->run_rows(sequence_, rows, want_logits, want_taps, tap_layers, logits, taps);
}

}  // namespace kdt
