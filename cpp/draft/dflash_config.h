// What a DFlash draft model is (Chen, Liang, Liu, arXiv 2602.06036): every number that its forward needs,
// with each ambiguity of the published format resolved.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "core/rotary.h"

namespace kdt {

struct DFlashConfig {
    int hidden_size;  // the target's: its embedding, head and taps
    int vocab_size;   // the target's
    int num_hidden_layers;
    int num_attention_heads, num_key_value_heads, head_dim;
    int intermediate_size;
    double rms_norm_eps;
    Rotary rotary;                   // over head_dim, pairs (j, j + head_dim / 2)
    int block_rows;                  // the root and block_rows - 1 masks: that many drafts
    int mask_token_id;               // a row of the target's embedding
    std::vector<int> target_layers;  // taps: the residual stream after these layers of the target
    std::vector<int> window;         // per layer: keys at distance < window are seen; 0: all
    std::vector<int> causal;         // per layer: 1, a row of the block sees no row behind itself

    int drafts() const { return block_rows - 1; }
    int tap_width() const { return static_cast<int>(target_layers.size()) * hidden_size; }
    int query_width() const { return num_attention_heads * head_dim; }
    int key_width() const { return num_key_value_heads * head_dim; }

    // Named scalars: hidden_size, vocab_size, num_hidden_layers, num_attention_heads, num_key_value_heads,
    // head_dim, intermediate_size, rms_norm_eps, rope_theta, rope_factor,
    // rope_original_max_position_embeddings, rope_beta_fast, rope_beta_slow, rope_amplitude, block_rows,
    // mask_token_id. Throws bad_model naming the field that is missing, unknown or out of range.
    static DFlashConfig from_fields(const std::map<std::string, double>& fields,
                                    std::vector<int> target_layers, std::vector<int> window,
                                    std::vector<int> causal);
    // Whether it fits a target. Throws bad_model with both numbers.
    void check_target(int target_hidden, int target_vocab, int target_layer_count) const;
};

}  // namespace kdt
