#include "draft/dflash.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "core/error.h"

namespace kdt {

namespace {

int feed_rows(const DFlashPlace& place) {
    return std::max(place.rows, DFlashRunner::kKeptRows);
}

// Bytes of one layer's pages.
size_t page_bytes(const DFlashConfig& c, const DFlashPlace& place, size_t element) {
    return static_cast<size_t>(place.page_count) * kPageSize * 2 * c.key_width() * element;
}

size_t block_entry_bytes(const DFlashConfig& c, size_t element) {
    return static_cast<size_t>(kMaxBlockRows) * 2 * c.key_width() * element;
}

// The block's last row may stand past the context: whether it does must not change the bits of the others.
int angles(const DFlashConfig& c, const DFlashPlace& place) {
    return place.context + c.block_rows;
}

}  // namespace

size_t DFlashRunner::bytes(const DFlashConfig& c, const DFlashPlace& place, size_t element) {
    const size_t rows = feed_rows(place), block = c.block_rows, hidden = c.hidden_size, tap = c.tap_width();
    const size_t query = c.query_width(), key = c.key_width(), drafts = c.drafts();
    const size_t floats = rows * (tap + hidden + 2 * key) +
                          static_cast<size_t>(place.sequences) * kKeptRows * tap +
                          block * (2 * hidden + 2 * query + c.intermediate_size) + drafts * c.vocab_size +
                          static_cast<size_t>(angles(c, place)) * c.head_dim;
    return c.num_hidden_layers * page_bytes(c, place, element) + block_entry_bytes(c, element) +
           floats * sizeof(float);
}

DFlashRunner::DFlashRunner(Backend& b, const DFlashModel& model, const DFlashPlace& place)
    : backend_(b), model_(model), place_(place) {
    const DFlashConfig& c = model.config;
    const size_t element = dtype_size(b.cache_dtype());
    const size_t rows = feed_rows(place), block = c.block_rows;
    const auto floats = [&](size_t n, const char* what) { return Buffer(b, n * sizeof(float), what); };

    pages_ = Buffer(b, c.num_hidden_layers * page_bytes(c, place, element), "draft KV pages");
    block_ = Buffer(b, block_entry_bytes(c, element), "draft KV of the block");
    taps_ = floats(rows * c.tap_width(), "taps");
    kept_ = floats(static_cast<size_t>(kept_capacity()) * c.tap_width(), "taps that wait");
    feature_ = floats(rows * c.hidden_size, "draft activations");
    k_ = floats(rows * c.key_width(), "draft activations");
    v_ = floats(rows * c.key_width(), "draft activations");
    x_ = floats(block * c.hidden_size, "draft activations");
    h_ = floats(block * c.hidden_size, "draft activations");
    q_ = floats(block * c.query_width(), "draft activations");
    o_ = floats(block * c.query_width(), "draft activations");
    act_ = floats(block * c.intermediate_size, "draft activations");
    logits_ = floats(static_cast<size_t>(c.drafts()) * c.vocab_size, "draft logits");
    for (const int window : c.window)
        b.reserve_block_attention(c.block_rows, c.num_attention_heads, c.head_dim,
                                  place.pages_per_sequence * kPageSize + c.block_rows, window);

    std::vector<float> cos, sin;
    rotary_table(c.rotary, angles(c, place), cos, sin);
    rope_cos_ = floats(cos.size(), "RoPE table");
    rope_sin_ = floats(sin.size(), "RoPE table");
    b.upload(rope_cos_.as<float>(), cos.data(), cos.size() * sizeof(float));
    b.upload(rope_sin_.as<float>(), sin.data(), sin.size() * sizeof(float));
    rope_ = {rope_cos_.as<float>(), rope_sin_.as<float>(), c.head_dim, angles(c, place), false};

    feed_.live = feed_in_.add<int32_t>(1);
    feed_.sequence = feed_in_.add<int32_t>(1);
    feed_.position = feed_in_.add<int32_t>(rows);
    feed_.index = feed_in_.add<int32_t>(kKeptRows);
    feed_in_.allocate(b, "draft input", true);

    table_width_ = std::min(kMaxTableWidth, c.vocab_size);
    in_.rows = block_in_.add<int32_t>(1);
    in_.drafts = block_in_.add<int32_t>(1);
    in_.sequence = block_in_.add<int32_t>(1);
    in_.start = block_in_.add<int32_t>(1);
    in_.token = block_in_.add<int32_t>(block);
    in_.position = block_in_.add<int32_t>(block);
    block_in_.allocate(b, "draft input", true);
    *block_in_.host<int32_t>(in_.rows) = c.block_rows;
    *block_in_.host<int32_t>(in_.drafts) = c.drafts();
    std::fill_n(block_in_.host<int32_t>(in_.token), c.block_rows, c.mask_token_id);

    table_.token = out_.add<int32_t>(static_cast<size_t>(c.drafts()) * table_width_);
    table_.logp = out_.add<float>(static_cast<size_t>(c.drafts()) * table_width_);
    out_.allocate(b, "draft table", true);

    // Recorded here, not in the middle of an answer.
    draft_graph_ = b.record([this] { queue_draft(); });
    for (size_t i = 0; i < kFeedSizes.size(); ++i)
        feed_graphs_[i] = b.record([this, capacity = kFeedSizes[i]] { queue_feed(capacity, true); });
}

void DFlashRunner::wait_for(bool uploading) {
    if (!uploading) return;
    backend_.synchronize();
    feed_uploading_ = block_uploading_ = false;
}

DraftCache DFlashRunner::cache(int layer) const {
    const size_t bytes = page_bytes(model_.config, place_, dtype_size(backend_.cache_dtype()));
    return {pages_.as<char>() + layer * bytes, block_.as<void>(), place_.page_table, place_.page_count,
            place_.pages_per_sequence};
}

// ------------------------------------------------------------------------------------------------------------
// features, keys and values of committed positions

void DFlashRunner::stage_feed(int sequence, int first, int count, bool from_kept) {
    wait_for(feed_uploading_);
    *feed_in_.host<int32_t>(feed_.live) = count;
    *feed_in_.host<int32_t>(feed_.sequence) = sequence;
    int32_t* const position = feed_in_.host<int32_t>(feed_.position);
    std::iota(position, position + count, first);
    if (from_kept) {
        int32_t* const index = feed_in_.host<int32_t>(feed_.index);
        std::iota(index, index + count, sequence * kKeptRows);
    }
    feed_in_.upload();
    feed_uploading_ = true;
}

void DFlashRunner::queue_feed(int capacity, bool from_kept) {
    const DFlashConfig& c = model_.config;
    const Rows rows{capacity, feed_in_.device<int32_t>(feed_.live)};
    const float eps = static_cast<float>(c.rms_norm_eps);
    float* feature = feature_.as<float>();
    if (from_kept)
        backend_.gather_rows(
            {rows, feed_in_.device<int32_t>(feed_.index), kept(), c.tap_width(), taps(), c.tap_width()});
    backend_.linear({rows, taps(), model_.weights.fc, feature, false});
    backend_.rms_norm(
        {rows, feature, c.hidden_size, model_.weights.hidden_norm, eps, c.hidden_size, feature});
    for (int i = 0; i < c.num_hidden_layers; ++i) {
        const DFlashLayer& w = model_.weights.layers[i];
        backend_.linear({rows, feature, w.k, k_.as<float>(), false});
        backend_.linear({rows, feature, w.v, v_.as<float>(), false});
        backend_.write_key_value({rows, feed_in_.device<int32_t>(feed_.position),
                                  feed_in_.device<int32_t>(feed_.sequence), false, k_.as<float>(),
                                  v_.as<float>(), w.k_norm, eps, c.num_key_value_heads, rope_, cache(i)});
    }
}

void DFlashRunner::feed_taps(int sequence, int first, int count) {
    if (count == 0) return;
    stage_feed(sequence, first, count, false);
    queue_feed(count, false);
}

void DFlashRunner::feed_kept(int sequence, int first, int count) {
    if (count == 0) return;
    stage_feed(sequence, first, count, true);
    size_t i = 0;
    while (kFeedSizes[i] < count) ++i;
    feed_graphs_[i]->launch();
}

// ------------------------------------------------------------------------------------------------------------
// the block

void DFlashRunner::queue_draft() {
    const DFlashConfig& c = model_.config;
    const Rows rows{c.block_rows, block_in_.device<int32_t>(in_.rows)};
    const Rows drafts{c.drafts(), block_in_.device<int32_t>(in_.drafts)};
    const int32_t* position = block_in_.device<int32_t>(in_.position);
    const int32_t* sequence = block_in_.device<int32_t>(in_.sequence);
    const float eps = static_cast<float>(c.rms_norm_eps);
    const int hidden = c.hidden_size;
    float* x = x_.as<float>();
    float* h = h_.as<float>();
    float* q = q_.as<float>();

    backend_.embed({rows, block_in_.device<int32_t>(in_.token), model_.embed, x});
    for (int i = 0; i < c.num_hidden_layers; ++i) {
        const DFlashLayer& w = model_.weights.layers[i];
        const DraftCache entries = cache(i);
        backend_.rms_norm({rows, x, hidden, w.input_norm, eps, hidden, h});
        backend_.linear({rows, h, w.q, q, false});
        backend_.norm_rotate({rows, position, q, w.q_norm, eps, c.num_attention_heads, rope_, q});
        backend_.linear({rows, h, w.k, k_.as<float>(), false});
        backend_.linear({rows, h, w.v, v_.as<float>(), false});
        backend_.write_key_value({rows, position, sequence, true, k_.as<float>(), v_.as<float>(), w.k_norm,
                                  eps, c.num_key_value_heads, rope_, entries});
        BlockAttendArgs attend{};
        attend.rows = rows;
        attend.position = position;
        attend.start = block_in_.device<int32_t>(in_.start);
        attend.sequence = sequence;
        attend.q = q;
        attend.cache = entries;
        attend.heads = c.num_attention_heads;
        attend.kv_heads = c.num_key_value_heads;
        attend.head_dim = c.head_dim;
        attend.block = c.block_rows;
        attend.window = c.window[i];
        attend.causal = c.causal[i] != 0;
        attend.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(c.head_dim)));
        attend.out = o_.as<float>();
        backend_.block_attend(attend);
        backend_.linear({rows, o_.as<float>(), w.o, x, true});
        backend_.reduce_ranks(rows, x, hidden);

        backend_.rms_norm({rows, x, hidden, w.post_attention_norm, eps, hidden, h});
        backend_.gated_linear({rows, h, w.gate, w.up, act_.as<float>()});
        backend_.linear({rows, act_.as<float>(), w.down, x, true});
        backend_.reduce_ranks(rows, x, hidden);
    }
    // The root's row is an anchor: what the head would say of it was never trained.
    backend_.rms_norm({drafts, x + hidden, hidden, model_.weights.norm, eps, hidden, h});
    backend_.linear({drafts, h, model_.head, logits_.as<float>(), false});
    backend_.top_k({drafts, logits_.as<float>(), c.vocab_size, table_width_,
                    out_.device<int32_t>(table_.token), out_.device<float>(table_.logp)});
}

void DFlashRunner::begin(int sequence, int start, int32_t root) {
    const DFlashConfig& c = model_.config;
    wait_for(block_uploading_);  // of a draft that was begun and forgotten
    *block_in_.host<int32_t>(in_.sequence) = sequence;
    *block_in_.host<int32_t>(in_.start) = start;
    *block_in_.host<int32_t>(in_.token) = root;
    int32_t* const position = block_in_.host<int32_t>(in_.position);
    std::iota(position, position + c.block_rows, start);
    block_in_.upload();
    block_uploading_ = true;
    draft_graph_->launch();
    begun_ = {sequence, start, root};
}

void DFlashRunner::draft(int sequence, int start, int32_t root, Proposal& proposal) {
    if (begun_ != Begun{sequence, start, root}) begin(sequence, start, root);
    out_.download();  // and waits for all uploads
    feed_uploading_ = block_uploading_ = false;
    begun_.sequence = -1;

    const DFlashConfig& c = model_.config;
    const size_t entries = static_cast<size_t>(c.drafts()) * table_width_;
    proposal.depth = c.drafts();
    proposal.width = table_width_;
    proposal.table_token.assign(out_.host<int32_t>(table_.token), out_.host<int32_t>(table_.token) + entries);
    proposal.table_logp.assign(out_.host<float>(table_.logp), out_.host<float>(table_.logp) + entries);
}

// ------------------------------------------------------------------------------------------------------------
// reading back

std::vector<float> DFlashRunner::features(int count) const {
    std::vector<float> values(static_cast<size_t>(count) * model_.config.hidden_size);
    backend_.download(values.data(), feature_.as<float>(), values.size() * sizeof(float));
    return values;
}

std::vector<float> DFlashRunner::logits() const {
    std::vector<float> values(static_cast<size_t>(model_.config.drafts()) * model_.config.vocab_size);
    backend_.download(values.data(), logits_.as<float>(), values.size() * sizeof(float));
    return values;
}

std::vector<float> DFlashRunner::cache(int layer, std::span<const int32_t> pages, int positions) const {
    const size_t width = 2 * static_cast<size_t>(model_.config.key_width());
    const size_t element = dtype_size(backend_.cache_dtype());
    std::vector<char> raw(positions * width * element);
    for (int p = 0; p < positions; p += kPageSize)
        backend_.download(raw.data() + p * width * element,
                          static_cast<const char*>(cache(layer).pages) +
                              static_cast<size_t>(pages[p / kPageSize]) * kPageSize * width * element,
                          std::min(kPageSize, positions - p) * width * element);
    return widen(raw, backend_.cache_dtype());
}

}  // namespace kdt
