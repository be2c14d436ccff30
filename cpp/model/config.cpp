#include "model/config.h"

#include <cmath>
#include <functional>

#include "core/error.h"
#include "core/fields.h"

namespace kdt {

namespace {

void require(bool ok, const char* what) {
    if (!ok) fail(ErrorCode::bad_model, "config: %s", what);
}

}  // namespace

double ModelConfig::softmax_scale() const {
    double scale = 1.0 / std::sqrt(static_cast<double>(query_head_dim()));
    if (rope_factor > 1.0 && rope_mscale_all_dim != 0.0) {
        const double m = 0.1 * rope_mscale_all_dim * std::log(rope_factor) + 1.0;
        scale *= m * m;
    }
    return scale;
}

ModelConfig ModelConfig::from_fields(const std::map<std::string, double>& fields) {
    FieldReader read(fields, "config");
    ModelConfig c{};
    c.vocab_size = read.integer("vocab_size", 1);
    c.hidden_size = read.integer("hidden_size", 1);
    c.num_hidden_layers = read.integer("num_hidden_layers", 1);
    c.num_attention_heads = read.integer("num_attention_heads", 1);
    c.q_lora_rank = read.integer("q_lora_rank", 0);
    c.kv_lora_rank = read.integer("kv_lora_rank", 1);
    c.qk_nope_head_dim = read.integer("qk_nope_head_dim", 1);
    c.qk_rope_head_dim = read.integer("qk_rope_head_dim", 2);
    c.v_head_dim = read.integer("v_head_dim", 1);
    c.intermediate_size = read.integer("intermediate_size", 1);
    c.moe_intermediate_size = read.integer("moe_intermediate_size", 0);
    c.n_routed_experts = read.integer("n_routed_experts", 0);
    c.num_experts_per_tok = read.integer("num_experts_per_tok", 0);
    c.n_shared_experts = read.integer("n_shared_experts", 0);
    c.first_k_dense_replace = read.integer("first_k_dense_replace", 0);
    c.n_group = read.integer("n_group", 1);
    c.topk_group = read.integer("topk_group", 1);
    c.scoring = read.flag("scoring") ? Scoring::softmax_greedy : Scoring::sigmoid_noaux_tc;
    c.norm_topk_prob = read.flag("norm_topk_prob");
    c.routed_scaling_factor = read.real("routed_scaling_factor");
    c.rms_norm_eps = read.real("rms_norm_eps");
    c.latent_norm_eps = read.real("latent_norm_eps");
    c.rope_theta = read.real("rope_theta");
    c.rope_interleave = read.flag("rope_interleave");
    c.rope_factor = read.real("rope_factor");
    c.rope_original_max_position_embeddings = read.real("rope_original_max_position_embeddings");
    c.rope_beta_fast = read.real("rope_beta_fast");
    c.rope_beta_slow = read.real("rope_beta_slow");
    c.rope_mscale = read.real("rope_mscale");
    c.rope_mscale_all_dim = read.real("rope_mscale_all_dim");
    c.max_position_embeddings = read.integer("max_position_embeddings", 1);
    read.finish();
    c.validate();
    return c;
}

void ModelConfig::validate() const {
    require(qk_rope_head_dim % 2 == 0, "qk_rope_head_dim must be even: RoPE rotates pairs");
    require(rms_norm_eps > 0 && latent_norm_eps > 0, "rms_norm_eps and latent_norm_eps must be positive");
    require(rope_theta > 1, "rope_theta must be greater than 1");
    if (rope_factor == 0) {
        require(rope_original_max_position_embeddings == 0 && rope_beta_fast == 0 && rope_beta_slow == 0 &&
                    rope_mscale == 0 && rope_mscale_all_dim == 0,
                "rope_factor is 0 (plain RoPE), so the other YaRN fields must be 0 too");
    } else {
        require(rope_factor >= 1, "rope_factor must be 0 (plain RoPE) or at least 1");
        require(rope_original_max_position_embeddings >= 1,
                "rope_original_max_position_embeddings must be at least 1 with YaRN");
        require(rope_beta_fast > 0 && rope_beta_slow > 0,
                "rope_beta_fast and rope_beta_slow must be positive with YaRN");
        require(rope_beta_fast >= rope_beta_slow, "rope_beta_fast must not be below rope_beta_slow");
        require(rope_mscale >= 0 && rope_mscale_all_dim >= 0,
                "rope_mscale and rope_mscale_all_dim must not be negative");
    }
    if (n_routed_experts == 0) return;
    require(moe_intermediate_size >= 1, "moe_intermediate_size must be at least 1 with routed experts");
    require(num_experts_per_tok >= 1 && num_experts_per_tok <= n_routed_experts,
            "num_experts_per_tok must lie between 1 and n_routed_experts");
    require(routed_scaling_factor > 0, "routed_scaling_factor must be positive: at 0 no expert counts");
    require(n_routed_experts % n_group == 0, "n_routed_experts must be a multiple of n_group");
    require(topk_group <= n_group, "topk_group must not exceed n_group");
    const int reachable = n_routed_experts / n_group * topk_group;
    require(num_experts_per_tok <= reachable, "num_experts_per_tok exceeds the experts of topk_group groups");
    require(n_group == 1 || scoring == Scoring::softmax_greedy || n_routed_experts / n_group >= 2,
            "a group needs at least two experts: its score is the sum of the two best");
}

}  // namespace kdt
