// Creation, sequences with their pages, reading back. Forwards are in executor_forward.cpp, a round's stages
// in executor_round.cpp.
#include "engine/executor.h"

#include <algorithm>

#include "core/error.h"
#include "engine/transfer.h"
#include "model/rope.h"

namespace kdt {

namespace {

constexpr int kDefaultContext = 8192;
constexpr int kDefaultPrefillRows = 256;

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

    stage_round();

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
