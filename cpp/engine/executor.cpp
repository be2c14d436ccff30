#include "engine/executor.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"
#include "ddtree/build.h"
#include "engine/stopwatch.h"
#include "model/rope.h"

namespace kdt {

namespace {

constexpr int kDefaultContext = 8192;
constexpr int kDefaultPrefillRows = 256;

template <class T>
void put(Backend& b, const Buffer& to, std::span<const T> values) {
    if (!values.empty()) b.upload(to.as<T>(), values.data(), values.size_bytes());
}

template <class T>
void put(Backend& b, const Buffer& to, T value) {
    b.upload(to.as<T>(), &value, sizeof value);
}

template <class T>
std::vector<T> get(Backend& b, const T* from, size_t n) {
    std::vector<T> values(n);
    if (n > 0) b.download(values.data(), from, n * sizeof(T));
    return values;
}

double gib(size_t bytes) {
    return static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0);
}

}  // namespace

Executor::Executor(std::shared_ptr<const Engine> engine, const ExecutorOptions& options)
    : engine_(std::move(engine)), turn_(engine_->turns()), backend_(engine_->backend()) {
    const ModelConfig& c = engine_->config();
    context_ = options.context != 0 ? options.context : std::min(c.max_position_embeddings, kDefaultContext);
    sessions_ = options.sessions;
    prefill_rows_ = options.prefill_rows != 0 ? options.prefill_rows : kDefaultPrefillRows;
    if (context_ < 2 || context_ > c.max_position_embeddings)
        fail(ErrorCode::invalid_argument,
             "context is %d; expected 2 to %d, the model's max_position_embeddings", context_,
             c.max_position_embeddings);
    if (sessions_ < 1 || sessions_ > 1024)
        fail(ErrorCode::invalid_argument, "sessions is %d; expected 1 to 1024", sessions_);
    if (prefill_rows_ < 1 || prefill_rows_ > 65536)
        fail(ErrorCode::invalid_argument, "prefill_rows is %d; expected 1 to 65536", prefill_rows_);
    max_rows_ = std::max(std::min(prefill_rows_, context_), kMaxTreeRows);
    pages_per_sequence_ = (context_ + kPageSize - 1) / kPageSize;
    if (static_cast<int64_t>(pages_per_sequence_) * sessions_ > INT32_MAX)
        fail(ErrorCode::invalid_argument, "context %d times %d sessions is more pages than can be numbered",
             context_, sessions_);
    page_count_ = pages_per_sequence_ * sessions_;

    const size_t width = c.cache_width(), layers = c.num_hidden_layers, half = c.qk_rope_head_dim / 2;
    const size_t element = dtype_size(backend_.cache_dtype());
    const size_t page_bytes = static_cast<size_t>(page_count_) * kPageSize * width * element;
    const size_t tree_bytes = kMaxTreeRows * width * element;
    const size_t logit_bytes = static_cast<size_t>(kMaxTreeRows) * c.vocab_size * sizeof(float);
    const size_t rope_bytes = static_cast<size_t>(context_) * half * sizeof(float);
    const size_t activation_bytes = ForwardScratch::bytes(c, max_rows_, kMaxTreeRows);
    const size_t kv_bytes = layers * (page_bytes + tree_bytes);
    const DFlashModel* draft = engine_->draft_model();
    const DFlashPlace place{nullptr, page_count_, pages_per_sequence_, sessions_, context_, max_rows_};
    const size_t draft_bytes = draft != nullptr ? DFlashRunner::bytes(draft->config, place, element) : 0;
    bytes_ = kv_bytes + logit_bytes + 2 * rope_bytes + activation_bytes + draft_bytes;
    const size_t available = backend_.memory_available();
    if (bytes_ > available)
        fail(ErrorCode::out_of_memory,
             "a context of %d tokens for %d session(s) needs %.2f GiB (KV %.2f, activations and logits %.2f, "
             "draft model %.2f) beside %.2f GiB of weights, and %.2f GiB are free on %s",
             context_, sessions_, gib(bytes_), gib(kv_bytes),
             gib(logit_bytes + 2 * rope_bytes + activation_bytes), gib(draft_bytes),
             gib(backend_.weight_bytes()), gib(available), backend_.name().c_str());

    pages_ = Buffer(backend_, layers * page_bytes, "KV pages");
    scratch_kv_ = Buffer(backend_, layers * tree_bytes, "tree KV");
    logits_ = Buffer(backend_, logit_bytes, "logits");
    activations_ = std::make_unique<ForwardScratch>(backend_, c, max_rows_, kMaxTreeRows);
    int widest = ForwardScratch::widest_input(c);
    if (draft != nullptr)
        widest = std::max({widest, draft->config.tap_width(), draft->config.query_width(),
                           draft->config.intermediate_size, draft->config.hidden_size});
    backend_.reserve_workspace({max_rows_, c.hidden_size, c.num_attention_heads, c.kv_lora_rank,
                                c.qk_rope_head_dim, std::max(c.num_experts_per_tok, 1), c.n_routed_experts,
                                std::max(c.moe_intermediate_size, 1), c.vocab_size, context_, widest});

    std::vector<float> cos, sin;
    rope_table(c, context_, cos, sin);
    rope_cos_ = Buffer(backend_, rope_bytes, "RoPE table");
    rope_sin_ = Buffer(backend_, rope_bytes, "RoPE table");
    put<float>(backend_, rope_cos_, std::span<const float>(cos));
    put<float>(backend_, rope_sin_, std::span<const float>(sin));
    rope_ = {rope_cos_.as<float>(), rope_sin_.as<float>(), c.qk_rope_head_dim, context_, c.rope_interleave};

    const auto ints = [&](size_t n) { return Buffer(backend_, n * sizeof(int32_t), "row batch"); };
    page_table_ = ints(static_cast<size_t>(sessions_) * pages_per_sequence_);
    token_ = ints(max_rows_);
    sequence_ = ints(max_rows_);
    position_ = ints(max_rows_);
    prefix_ = ints(max_rows_);
    ancestor_count_ = ints(max_rows_);
    ancestors_ = ints(static_cast<size_t>(max_rows_) * kMaxAncestors);
    live_ = ints(1);
    logit_index_ = ints(max_rows_);
    logit_live_ = ints(1);
    tap_index_ = ints(max_rows_);
    tap_live_ = ints(1);
    batch_ = {token_.as<int32_t>(),  sequence_.as<int32_t>(),       position_.as<int32_t>(),
              prefix_.as<int32_t>(), ancestor_count_.as<int32_t>(), ancestors_.as<int32_t>()};

    selected_ = ints(max_rows_);

    in_.start = round_in_.add<int32_t>(1);
    in_.nodes = round_in_.add<int32_t>(1);
    in_.sequence = round_in_.add<int32_t>(1);
    in_.limit = round_in_.add<int32_t>(1);
    in_.stop_count = round_in_.add<int32_t>(1);
    in_.stops = round_in_.add<int32_t>(kMaxStops);
    in_.sample = round_in_.add<SampleParams>(1);
    in_.kept_row = round_in_.add<int32_t>(1);
    in_.count = round_in_.add<int32_t>(1);
    in_.token = round_in_.add<int32_t>(kMaxTreeRows);
    in_.parent = round_in_.add<int32_t>(kMaxTreeRows);
    in_.depth = round_in_.add<int32_t>(kMaxTreeRows);
    in_.source = round_in_.add<int32_t>(kMaxTreeRows);
    in_.weight = round_in_.add<double>(kMaxTreeRows);
    round_in_.allocate(backend_, "round input", true);
    out_.length = round_out_.add<int32_t>(1);
    out_.failed = round_out_.add<int32_t>(1);
    out_.path = round_out_.add<int32_t>(kMaxTreeRows);
    out_.emitted = round_out_.add<int32_t>(kMaxTreeRows);
    round_out_.allocate(backend_, "round output", true);
    round_out_.upload();  // a read-back copies all of it, also what a short walk leaves unwritten
    tree_.count = round_in_.device<int32_t>(in_.count);
    tree_.token = round_in_.device<int32_t>(in_.token);
    tree_.parent = round_in_.device<int32_t>(in_.parent);
    tree_.depth = round_in_.device<int32_t>(in_.depth);
    tree_.source = round_in_.device<int32_t>(in_.source);
    tree_.weight = round_in_.device<double>(in_.weight);

    caches_.resize(layers);
    for (size_t i = 0; i < layers; ++i)
        caches_[i] = {pages_.as<char>() + i * page_bytes, scratch_kv_.as<char>() + i * tree_bytes,
                      page_table_.as<int32_t>(), page_count_, pages_per_sequence_};

    free_pages_.resize(page_count_);
    for (int i = 0; i < page_count_; ++i) free_pages_[i] = page_count_ - 1 - i;
    sequence_pages_.resize(sessions_);
    sequence_open_.resize(sessions_, false);
    for (int s = 0; s < sessions_; ++s) load_page_table(s);

    if (draft != nullptr) {
        DFlashPlace at = place;
        at.page_table = page_table_.as<int32_t>();
        draft_runner_ = std::make_unique<DFlashRunner>(backend_, *draft, at);
    }
    turn_.unlock();
}

Executor::~Executor() {
    turn_.lock();
}

// ------------------------------------------------------------------------------------------------------------
// sequences

bool Executor::vacant() const {
    return std::find(sequence_open_.begin(), sequence_open_.end(), false) != sequence_open_.end();
}

int Executor::open_sequence() {
    for (int s = 0; s < sessions_; ++s) {
        if (sequence_open_[s]) continue;
        sequence_open_[s] = true;
        return s;
    }
    fail(ErrorCode::out_of_memory,
         "all %d sessions of this executor are open; close one or create it with more", sessions_);
}

void Executor::close_sequence(int sequence) {
    shrink(sequence, 0);
    sequence_open_[sequence] = false;
}

void Executor::reserve(int sequence, int positions) {
    if (positions > context_)
        fail(ErrorCode::out_of_memory, "%d positions do not fit into the context of %d", positions, context_);
    std::vector<int32_t>& pages = sequence_pages_[sequence];
    const size_t wanted = static_cast<size_t>((positions + kPageSize - 1) / kPageSize);
    if (pages.size() >= wanted) return;
    if (wanted - pages.size() > free_pages_.size())
        fail(ErrorCode::out_of_memory, "%zu KV pages are needed and %zu of %d are free",
             wanted - pages.size(), free_pages_.size(), page_count_);
    while (pages.size() < wanted) {
        pages.push_back(free_pages_.back());
        free_pages_.pop_back();
    }
    load_page_table(sequence);
}

void Executor::shrink(int sequence, int positions) {
    std::vector<int32_t>& pages = sequence_pages_[sequence];
    const size_t wanted = static_cast<size_t>((positions + kPageSize - 1) / kPageSize);
    if (pages.size() <= wanted) return;
    while (pages.size() > wanted) {
        free_pages_.push_back(pages.back());
        pages.pop_back();
    }
    load_page_table(sequence);
}

void Executor::load_page_table(int sequence) {
    std::vector<int32_t> row(pages_per_sequence_, -1);
    std::copy(sequence_pages_[sequence].begin(), sequence_pages_[sequence].end(), row.begin());
    backend_.upload(page_table_.as<int32_t>() + static_cast<size_t>(sequence) * pages_per_sequence_,
                    row.data(), row.size() * sizeof(int32_t));
}

// ------------------------------------------------------------------------------------------------------------
// forwards

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

// ------------------------------------------------------------------------------------------------------------
// round stages

const Tree& Executor::build(int32_t root, const Proposal& proposal, int budget, int max_depth) {
    const size_t entries = static_cast<size_t>(proposal.depth) * proposal.width;
    if (proposal.table_token.size() != entries || proposal.table_logp.size() != entries)
        fail(ErrorCode::invalid_argument,
             "a draft table of [%d, %d] holds %zu tokens and %zu log-probabilities", proposal.depth,
             proposal.width, proposal.table_token.size(), proposal.table_logp.size());
    const DraftTable table{proposal.depth, proposal.width, proposal.table_token.data(),
                           proposal.table_logp.data()};
    const size_t paths = proposal.paths.size();
    std::vector<int32_t> length(paths), token(paths * kMaxDepth, -1);
    std::vector<float> logp(token.size(), 0.0f);
    for (size_t p = 0; p < paths; ++p) {
        const Proposal::Path& path = proposal.paths[p];
        length[p] = static_cast<int32_t>(std::min<size_t>({path.token.size(), path.logp.size(), kMaxDepth}));
        std::copy_n(path.token.begin(), length[p], token.begin() + p * kMaxDepth);
        std::copy_n(path.logp.begin(), length[p], logp.begin() + p * kMaxDepth);
    }
    const DraftPaths list{static_cast<int>(paths), kMaxDepth, length.data(), token.data(), logp.data()};
    host_tree_ = build_tree(root, table, list,
                            {std::clamp(budget, 0, kMaxNodes), std::clamp(max_depth, 0, kMaxDepth),
                             engine_->config().vocab_size});

    return host_tree_;
}

bool Executor::verify(const VerifyRequest& request) {
    *round_in_.host<int32_t>(in_.start) = request.start;
    *round_in_.host<int32_t>(in_.nodes) = request.nodes;
    *round_in_.host<int32_t>(in_.sequence) = request.sequence;
    *round_in_.host<int32_t>(in_.limit) = request.limit;
    *round_in_.host<int32_t>(in_.stop_count) = static_cast<int32_t>(request.stops.size());
    round_in_.set(in_.stops, std::vector<int32_t>(request.stops.begin(), request.stops.end()));
    *round_in_.host<SampleParams>(in_.sample) = request.sample;
    *round_in_.host<int32_t>(in_.kept_row) = request.kept_row;
    *round_in_.host<int32_t>(in_.count) = host_tree_.count;
    round_in_.set(in_.token, host_tree_.token);
    round_in_.set(in_.parent, host_tree_.parent);
    round_in_.set(in_.depth, host_tree_.depth);
    round_in_.set(in_.source, host_tree_.source);
    round_in_.set(in_.weight, host_tree_.weight);
    return launch_round(request.nodes, request.kept_row >= 0, request.cancel);
}

bool Executor::launch_round(int nodes, bool taps, const std::atomic<bool>* cancel) {
    Stopwatch watch;
    stage_seconds_ = {};
    // What is recorded runs to its end: a device looks here, a backend that computes at once in every layer.
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return false;
    round_in_.upload();

    cancel_ = cancel;
    was_cancelled_ = false;
    Graph* const graph = round_graph(nodes + 1, taps);
    if (graph == nullptr) return false;
    graph->launch();
    stage_seconds_.verify += watch.lap() - stage_seconds_.accept - stage_seconds_.commit;
    return !was_cancelled_;
}

// One recording per size of the cost table: rows in between ride as padding, which changes no bit and loads
// no weights.
Graph* Executor::round_graph(int rows, bool taps) {
    const size_t i = CostTable::index(rows - 1);
    std::unique_ptr<Graph>& graph = round_graphs_[taps][i];
    recorded_ = !graph && backend_.queues();
    if (!graph) {
        graph = backend_.record(
            [this, capacity = CostTable::kSizes[i] + 1, taps] { queue_round(capacity, taps); });
        if (was_cancelled_) graph.reset();  // in the middle of the recording
    }
    return graph.get();
}

void Executor::queue_round(int capacity, bool taps) {
    const int32_t* start = round_in_.device<int32_t>(in_.start);
    const int32_t* sequence = round_in_.device<int32_t>(in_.sequence);
    backend_.tree_rows(
        {tree_, round_in_.device<int32_t>(in_.nodes), sequence, start, batch_, live_.as<int32_t>()});

    ForwardArgs args = forward_args(capacity);
    args.want_logits = {args.rows, nullptr};
    if (taps) want_taps(args);
    if (!run(args)) {
        was_cancelled_ = true;
        return;
    }
    backend_.select({args.rows, logits_.as<float>(), engine_->config().vocab_size, batch_.position,
                     round_in_.device<SampleParams>(in_.sample), selected_.as<int32_t>()});

    Stopwatch watch;
    AcceptArgs accept{};
    accept.tree = tree_;
    accept.live = live_.as<int32_t>();
    accept.selected = selected_.as<int32_t>();
    accept.limit = round_in_.device<int32_t>(in_.limit);
    accept.stop_count = round_in_.device<int32_t>(in_.stop_count);
    accept.stops = round_in_.device<int32_t>(in_.stops);
    accept.length = round_out_.device<int32_t>(out_.length);
    accept.failed = round_out_.device<int32_t>(out_.failed);
    accept.path = round_out_.device<int32_t>(out_.path);
    accept.emitted = round_out_.device<int32_t>(out_.emitted);
    backend_.accept(accept);
    stage_seconds_.accept = watch.lap();

    backend_.commit({accept.length, accept.path, start, sequence, engine_->config().cache_width(),
                     caches_.front(), static_cast<int>(caches_.size()), pages_.bytes() / caches_.size(),
                     scratch_kv_.bytes() / caches_.size()});
    if (taps)
        backend_.keep_taps({accept.length, accept.path, round_in_.device<int32_t>(in_.kept_row),
                            draft_runner_->kept_capacity(), draft_runner_->config().tap_width(),
                            draft_runner_->taps(), draft_runner_->kept()});
    stage_seconds_.commit = watch.lap();
}

Executor::Walk Executor::walk() {
    Stopwatch watch;
    round_out_.download();
    stage_seconds_.verify += watch.lap();
    const int length = *round_out_.host<int32_t>(out_.length);
    const int32_t* path = round_out_.host<int32_t>(out_.path);
    const int32_t* emitted = round_out_.host<int32_t>(out_.emitted);
    Walk walk;
    walk.seconds = stage_seconds_;
    walk.recorded = recorded_;
    walk.failed = *round_out_.host<int32_t>(out_.failed) != 0;
    walk.path.assign(path, path + length);
    walk.emitted.assign(emitted, emitted + length);
    const std::vector<int32_t>& parent = host_tree_.parent;
    for (int j = 1; j < length; ++j) {
        const auto first = std::find(parent.begin(), parent.end(), walk.path[j - 1]);
        if (first - parent.begin() != walk.path[j]) walk.branched = true;
    }
    return walk;
}

int32_t Executor::select_last(const SampleParams& sample, int rows) {
    *round_in_.host<SampleParams>(in_.sample) = sample;
    round_in_.upload();
    backend_.select({{1, logit_live_.as<int32_t>()},
                     logits_.as<float>(),
                     engine_->config().vocab_size,
                     batch_.position + rows - 1,
                     round_in_.device<SampleParams>(in_.sample),
                     selected_.as<int32_t>()});
    return get(backend_, selected_.as<int32_t>(), 1)[0];
}

void Executor::measure_costs(int sequence, int start, std::span<const int32_t> text, bool taps) {
    // Distinct tokens, the text's own as far as they go: rows that are equal would share all of their
    // experts.
    const int vocab = engine_->config().vocab_size;
    std::vector<int32_t> tokens(text.rbegin(), text.rend());
    for (int i = 0; i < kMaxTreeRows; ++i) tokens.push_back(static_cast<int32_t>((1 + 7919ll * i) % vocab));
    std::vector<int32_t> distinct;
    for (const int32_t token : tokens) {
        if (distinct.size() == static_cast<size_t>(kMaxTreeRows)) break;
        if (std::find(distinct.begin(), distinct.end(), token) == distinct.end()) distinct.push_back(token);
    }
    while (distinct.size() < static_cast<size_t>(kMaxTreeRows)) distinct.push_back(distinct.front());

    host_tree_ = Tree{};
    host_tree_.count = kMaxNodes;
    host_tree_.token = distinct;
    host_tree_.parent.assign(kMaxTreeRows, 0);
    host_tree_.depth.assign(kMaxTreeRows, 1);
    host_tree_.source.assign(kMaxTreeRows, kFromTable);
    host_tree_.weight.assign(kMaxTreeRows, -1.0);
    host_tree_.parent[0] = -1;
    host_tree_.depth[0] = host_tree_.source[0] = 0;
    host_tree_.weight[0] = 0.0;
    VerifyRequest request;
    request.sequence = sequence;
    request.start = start;
    request.limit = 0;
    if (taps) request.kept_row = sequence * DFlashRunner::kKeptRows;
    const auto once = [&](int nodes) {
        Stopwatch watch;
        request.nodes = nodes;
        verify(request);
        walk();
        return watch.lap();
    };
    // A first run records the graph, and a device's first launch of it loads it.
    engine_->costs().measure(once, CostTable::kLimitSeconds, [&](int nodes) {
        const bool ready = !backend_.queues() || round_graphs_[taps][CostTable::index(nodes)] != nullptr;
        return ready ? 0.0 : once(nodes);
    });
}

// ------------------------------------------------------------------------------------------------------------
// reading back

std::vector<float> Executor::logits(int row) const {
    const size_t vocab = engine_->config().vocab_size;
    return get(backend_, logits_.as<float>() + row * vocab, vocab);
}

std::vector<float> Executor::cache(int sequence, int layer, int positions) const {
    const size_t width = engine_->config().cache_width();
    const size_t element = dtype_size(backend_.cache_dtype());
    std::vector<char> raw(positions * width * element);
    for (int p = 0; p < positions; p += kPageSize) {
        const size_t page = sequence_pages_[sequence][p / kPageSize];
        backend_.download(raw.data() + p * width * element,
                          static_cast<const char*>(caches_[layer].pages) + page * kPageSize * width * element,
                          std::min(kPageSize, positions - p) * width * element);
    }
    return widen(raw, backend_.cache_dtype());
}

std::vector<float> Executor::draft_cache(int sequence, int layer, int positions) const {
    return draft_runner_->cache(layer, sequence_pages_[sequence], positions);
}

}  // namespace kdt
