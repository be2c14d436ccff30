// What a model is: every number that the forward pass needs. No field has a default that a checkpoint could
// miss: `from_fields` fails on a missing and on an unknown key.
#pragma once

#include <map>
#include <string>

#include "backend/backend.h"

namespace kdt {

struct ModelConfig {
    int vocab_size;         // rows of embedding and head
    int hidden_size;        // width of the residual stream
    int num_hidden_layers;  // all layers, dense ones included
    int num_attention_heads;
    int q_lora_rank;       // 0: q_proj directly, no norm
    int kv_lora_rank;      // latent width: what the cache holds, after its norm
    int qk_nope_head_dim;  // per-head query and key width without position
    int qk_rope_head_dim;  // per-head width with RoPE; the key part is shared by all heads
    int v_head_dim;
    int intermediate_size;      // of dense layers
    int moe_intermediate_size;  // of one routed expert
    int n_routed_experts;       // 0: every layer is dense
    int num_experts_per_tok;    // top-k
    int n_shared_experts;       // one MLP of n_shared_experts * moe_intermediate_size; 0: none
    int first_k_dense_replace;  // layers before this one are dense
    int n_group, topk_group;    // group-limited routing; 1, 1: off
    Scoring scoring;            // 0: sigmoid, noaux_tc with correction bias; 1: softmax, greedy
    bool norm_topk_prob;
    double routed_scaling_factor;
    double rms_norm_eps;     // input, post-attention and final norm
    double latent_norm_eps;  // q_a_layernorm and kv_a_layernorm
    double rope_theta;
    bool rope_interleave;  // pairs (2j, 2j + 1); false: (j, j + d / 2)
    double rope_factor;    // YaRN; 0: plain RoPE, and the five fields below are 0 too
    double rope_original_max_position_embeddings;
    double rope_beta_fast, rope_beta_slow;
    double rope_mscale, rope_mscale_all_dim;
    int max_position_embeddings;  // upper bound of any context

    int query_head_dim() const { return qk_nope_head_dim + qk_rope_head_dim; }
    int cache_width() const { return kv_lora_rank + qk_rope_head_dim; }
    bool is_moe(int layer) const { return n_routed_experts > 0 && layer >= first_k_dense_replace; }

    // (nope + rope)^-1/2, times YaRN's m(mscale_all_dim)^2 where mscale_all_dim is not zero.
    double softmax_scale() const;

    // Named scalars as they stand in a bundle (`config.KEY`) or come from Python. Throws bad_model naming the
    // field.
    static ModelConfig from_fields(const std::map<std::string, double>& fields);
    void validate() const;
};

}  // namespace kdt
