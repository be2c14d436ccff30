// Forwards of the executor: prompt rows, rows of any kind as tests ask for them.
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "engine/executor.h"
#include "engine/transfer.h"

namespace kdt {

ForwardArgs Executor::forward_args(int capacity) {
    ForwardArgs args;
    args.rows = {capacity, live_.as<int32_t>()};
    args.batch = batch_;
    args.caches = &caches_;
    args.rope = rope_;
    args.logits = logits_.as<float>();
    args.cancelled = [this] { return cancel_ != nullptr && cancel_->load(std::memory_order_relaxed); };
    return args;
}

// Taps of all rows, to the draft runner.
void Executor::want_taps(ForwardArgs& args) const {
    args.tap_layers = &draft_runner_->config().target_layers;
    args.want_taps = {args.rows, nullptr};
    args.taps = draft_runner_->taps();
}

bool Executor::run(const ForwardArgs& args) {
    return forward(backend_, engine_->config(), engine_->weights(), *activations_, args);
}

void Executor::upload_rows(int sequence, std::span<const RowSpec> rows) {
    const size_t n = rows.size();
    std::vector<int32_t> token(n), seq(n, sequence), position(n), prefix(n), count(n),
        ancestors(n * kMaxAncestors, 0);
    bool any_tree_row = false;
    for (size_t i = 0; i < n; ++i) {
        token[i] = rows[i].token;
        position[i] = rows[i].position;
        prefix[i] = rows[i].prefix;
        count[i] = static_cast<int32_t>(rows[i].ancestors.size());
        std::copy(rows[i].ancestors.begin(), rows[i].ancestors.end(), ancestors.begin() + i * kMaxAncestors);
        any_tree_row |= count[i] > 0;
    }
    put<int32_t>(backend_, token_, std::span<const int32_t>(token));
    put<int32_t>(backend_, sequence_, std::span<const int32_t>(seq));
    put<int32_t>(backend_, position_, std::span<const int32_t>(position));
    put<int32_t>(backend_, prefix_, std::span<const int32_t>(prefix));
    put<int32_t>(backend_, ancestor_count_, std::span<const int32_t>(count));
    if (any_tree_row) put<int32_t>(backend_, ancestors_, std::span<const int32_t>(ancestors));
    put<int32_t>(backend_, live_, static_cast<int32_t>(n));
}

bool Executor::run_prompt(int sequence, std::span<const int32_t> tokens, int first, int logit_rows, bool taps,
                          const std::atomic<bool>* cancel) {
    const int n = static_cast<int>(tokens.size());
    std::vector<RowSpec> rows(n);
    for (int i = 0; i < n; ++i) {
        rows[i].token = tokens[i];
        rows[i].position = first + i;
        rows[i].prefix = first + i + 1;
    }
    upload_rows(sequence, rows);
    std::vector<int32_t> index(logit_rows);
    std::iota(index.begin(), index.end(), n - logit_rows);
    put<int32_t>(backend_, logit_index_, std::span<const int32_t>(index));
    put<int32_t>(backend_, logit_live_, static_cast<int32_t>(logit_rows));
    ForwardArgs args = forward_args(n);
    args.want_logits = {{logit_rows, logit_live_.as<int32_t>()}, logit_index_.as<int32_t>()};
    if (taps) want_taps(args);
    cancel_ = cancel;
    return run(args);
}

void Executor::check_forwardable(std::span<const RowSpec> rows) const {
    const int vocab = engine_->config().vocab_size;
    if (rows.empty() || rows.size() > static_cast<size_t>(max_rows_))
        fail(ErrorCode::invalid_argument, "a forward has %zu rows; expected 1 to %d", rows.size(), max_rows_);
    for (size_t i = 0; i < rows.size(); ++i) {
        const RowSpec& r = rows[i];
        if (r.token < 0 || r.token >= vocab)
            fail(ErrorCode::invalid_argument, "row %zu: token %d is outside the vocabulary of %d", i, r.token,
                 vocab);
        if (r.position < 0 || r.position >= context_)
            fail(ErrorCode::invalid_argument, "row %zu: position %d is outside the context of %d", i,
                 r.position, context_);
        if (r.ancestors.empty()) {
            if (r.prefix != r.position + 1)
                fail(ErrorCode::invalid_argument,
                     "row %zu: a prompt row at position %d sees %d positions; expected %d", i, r.position,
                     r.prefix, r.position + 1);
            continue;
        }
        if (i >= static_cast<size_t>(kMaxTreeRows))
            fail(ErrorCode::invalid_argument, "row %zu is a tree row; at most %d rows can be", i,
                 kMaxTreeRows);
        if (r.ancestors.size() > static_cast<size_t>(kMaxAncestors) ||
            r.ancestors.back() != static_cast<int32_t>(i))
            fail(ErrorCode::invalid_argument,
                 "row %zu: ancestors must be at most %d rows and end with the row itself", i, kMaxAncestors);
        if (r.prefix < 0 || r.prefix > r.position)
            fail(ErrorCode::invalid_argument,
                 "row %zu: a tree row at position %d sees %d committed positions", i, r.position, r.prefix);
        for (const int32_t a : r.ancestors)
            if (a < 0 || a >= static_cast<int32_t>(rows.size()) || rows[a].ancestors.empty())
                fail(ErrorCode::invalid_argument, "row %zu: ancestor %d is not a tree row of this batch", i,
                     a);
    }
}

void Executor::run_rows(int sequence, std::span<const RowSpec> rows, std::span<const int32_t> want_logits,
                        std::span<const int32_t> want_taps, const std::vector<int>& tap_layers,
                        std::vector<float>& logits, std::vector<float>& taps) {
    check_forwardable(rows);
    cancel_ = nullptr;
    const int n = static_cast<int>(rows.size());
    if (want_logits.size() > static_cast<size_t>(kMaxTreeRows))
        fail(ErrorCode::invalid_argument, "%zu rows want logits; expected at most %d", want_logits.size(),
             kMaxTreeRows);
    if (want_taps.size() > static_cast<size_t>(max_rows_))
        fail(ErrorCode::invalid_argument, "%zu rows want taps; expected at most %d", want_taps.size(),
             max_rows_);
    for (const auto& wanted : {want_logits, want_taps}) {
        for (const int32_t i : wanted)
            if (i < 0 || i >= n)
                fail(ErrorCode::invalid_argument, "row %d wants logits or taps, of %d rows", i, n);
    }
    for (size_t i = 0; i < tap_layers.size(); ++i) {
        const int layer = tap_layers[i];
        if (layer < 0 || layer >= engine_->config().num_hidden_layers)
            fail(ErrorCode::invalid_argument, "tap layer %d; the model has layers 0 to %d", layer,
                 engine_->config().num_hidden_layers - 1);
        if (std::find(tap_layers.begin(), tap_layers.begin() + i, layer) != tap_layers.begin() + i)
            fail(ErrorCode::invalid_argument, "tap layer %d is named twice", layer);
    }
    int last = 0;
    for (const RowSpec& r : rows) last = std::max(last, r.ancestors.empty() ? r.position + 1 : r.prefix);
    reserve(sequence, last);

    const ModelConfig& c = engine_->config();
    const size_t tap_width = tap_layers.size() * static_cast<size_t>(c.hidden_size);
    Buffer tap_buffer;
    if (!want_taps.empty() && tap_width > 0)
        tap_buffer = Buffer(backend_, want_taps.size() * tap_width * sizeof(float), "taps");
    upload_rows(sequence, rows);
    put<int32_t>(backend_, logit_index_, want_logits);
    put<int32_t>(backend_, logit_live_, static_cast<int32_t>(want_logits.size()));
    put<int32_t>(backend_, tap_index_, want_taps);
    put<int32_t>(backend_, tap_live_, static_cast<int32_t>(want_taps.size()));
    ForwardArgs args = forward_args(n);
    args.want_logits = {{static_cast<int>(want_logits.size()), logit_live_.as<int32_t>()},
                        logit_index_.as<int32_t>()};
    if (tap_buffer.bytes() > 0) {
        args.tap_layers = &tap_layers;
        args.want_taps = {{static_cast<int>(want_taps.size()), tap_live_.as<int32_t>()},
                          tap_index_.as<int32_t>()};
        args.taps = tap_buffer.as<float>();
    }
    run(args);
    logits = get(backend_, logits_.as<float>(), want_logits.size() * c.vocab_size);
    taps = get(backend_, tap_buffer.as<float>(), tap_buffer.bytes() / sizeof(float));
}

}  // namespace kdt
