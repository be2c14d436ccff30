#include "draft/dflash_config.h"

#include <algorithm>

#include "core/error.h"
#include "core/fields.h"
#include "core/limits.h"

namespace kdt {

namespace {

constexpr const char* kWhere = "draft config";
constexpr int kMaxWindow = 1 << 24;
constexpr int kMaxTaps = 64;

void require(bool ok, const char* what) {
    if (!ok) fail(ErrorCode::bad_model, "%s: %s", kWhere, what);
}

}  // namespace

DFlashConfig DFlashConfig::from_fields(const std::map<std::string, double>& fields,
                                       std::vector<int> target_layers, std::vector<int> window,
                                       std::vector<int> causal) {
    FieldReader read(fields, kWhere);
    DFlashConfig c{};
    c.hidden_size = read.integer("hidden_size", 1);
    c.vocab_size = read.integer("vocab_size", 1);
    c.num_hidden_layers = read.integer("num_hidden_layers", 1, 1024);
    c.num_attention_heads = read.integer("num_attention_heads", 1, 4096);
    c.num_key_value_heads = read.integer("num_key_value_heads", 1, 4096);
    c.head_dim = read.integer("head_dim", 2, 1024);
    c.intermediate_size = read.integer("intermediate_size", 1);
    c.rms_norm_eps = read.real("rms_norm_eps");
    c.rotary.dim = c.head_dim;
    c.rotary.theta = read.real("rope_theta");
    c.rotary.factor = read.real("rope_factor");
    c.rotary.original_positions = read.real("rope_original_max_position_embeddings");
    c.rotary.beta_fast = read.real("rope_beta_fast");
    c.rotary.beta_slow = read.real("rope_beta_slow");
    c.rotary.amplitude = read.real("rope_amplitude");
    c.block_rows = read.integer("block_rows", 2, kMaxBlockRows);
    c.mask_token_id = read.integer("mask_token_id", 0);
    read.finish();
    c.target_layers = std::move(target_layers);
    c.window = std::move(window);
    c.causal = std::move(causal);

    require(c.head_dim % 2 == 0, "head_dim must be even: RoPE rotates pairs");
    require(c.num_attention_heads % c.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads");
    require(c.rms_norm_eps > 0, "rms_norm_eps must be positive");
    require(c.rotary.theta > 1, "rope_theta must be greater than 1");
    require(c.rotary.amplitude > 0, "rope_amplitude must be positive");
    if (c.rotary.factor == 0) {
        require(c.rotary.original_positions == 0 && c.rotary.beta_fast == 0 && c.rotary.beta_slow == 0 &&
                    c.rotary.amplitude == 1,
                "rope_factor is 0 (plain RoPE), so the other YaRN fields must be 0 and the amplitude 1");
    } else {
        require(c.rotary.factor >= 1, "rope_factor must be 0 (plain RoPE) or at least 1");
        require(c.rotary.original_positions >= 1,
                "rope_original_max_position_embeddings must be at least 1 with YaRN");
        require(c.rotary.beta_fast > 0 && c.rotary.beta_slow > 0,
                "rope_beta_fast and rope_beta_slow must be positive with YaRN");
    }
    if (c.mask_token_id >= c.vocab_size)
        fail(ErrorCode::bad_model, "%s.mask_token_id is %d, outside the vocabulary of %d", kWhere,
             c.mask_token_id, c.vocab_size);
    const std::vector<int>& taps = c.target_layers;  // in the order in which fc takes them
    if (taps.empty() || taps.size() > static_cast<size_t>(kMaxTaps))
        fail(ErrorCode::bad_model, "%s: target_layer_ids has %zu layers; expected 1 to %d", kWhere,
             taps.size(), kMaxTaps);
    for (size_t i = 0; i < taps.size(); ++i)
        if (std::find(taps.begin(), taps.begin() + i, taps[i]) != taps.begin() + i)
            fail(ErrorCode::bad_model, "%s: target_layer_ids names layer %d twice", kWhere, taps[i]);
    const size_t layers = static_cast<size_t>(c.num_hidden_layers);
    if (c.window.size() != layers || c.causal.size() != layers)
        fail(ErrorCode::bad_model, "%s: %zu windows and %zu causal flags for %zu layers", kWhere,
             c.window.size(), c.causal.size(), layers);
    for (const int w : c.window)
        if (w < 0 || w > kMaxWindow)
            fail(ErrorCode::bad_model, "%s: a sliding window of %d; expected 0 (none) to %d", kWhere, w,
                 kMaxWindow);
    for (const int flag : c.causal) require(flag == 0 || flag == 1, "a causal flag is neither 0 nor 1");
    return c;
}

void DFlashConfig::check_target(int target_hidden, int target_vocab, int target_layer_count) const {
    if (hidden_size != target_hidden)
        fail(ErrorCode::bad_model, "%s.hidden_size is %d, but the target's is %d", kWhere, hidden_size,
             target_hidden);
    if (vocab_size != target_vocab)
        fail(ErrorCode::bad_model, "%s.vocab_size is %d, but the target's is %d", kWhere, vocab_size,
             target_vocab);
    for (const int layer : target_layers)
        if (layer < 0 || layer >= target_layer_count)
            fail(ErrorCode::bad_model, "%s: target_layer_ids names layer %d; the target has layers 0 to %d",
                 kWhere, layer, target_layer_count - 1);
}

}  // namespace kdt
