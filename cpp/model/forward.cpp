#include "model/forward.h"

#include <algorithm>

namespace kdt {

namespace {

// Widths of the activations, so that allocation and its forecast cannot differ.
struct Widths {
    size_t hidden, q_a, q, ckv, q_latent, o_latent, o, act, top_k;

    explicit Widths(const ModelConfig& c)
        : hidden(c.hidden_size),
          q_a(std::max(c.q_lora_rank, 1)),
          q(static_cast<size_t>(c.num_attention_heads) * c.query_head_dim()),
          ckv(c.cache_width()),
          q_latent(static_cast<size_t>(c.num_attention_heads) * c.cache_width()),
          o_latent(static_cast<size_t>(c.num_attention_heads) * c.kv_lora_rank),
          o(static_cast<size_t>(c.num_attention_heads) * c.v_head_dim),
          act(std::max<size_t>(c.intermediate_size,
                               static_cast<size_t>(c.n_shared_experts) * c.moe_intermediate_size)),
          top_k(std::max(c.num_experts_per_tok, 1)) {}
};

}  // namespace

ForwardScratch::ForwardScratch(Backend& b, const ModelConfig& config, int rows, int logit_rows) {
    const Widths w(config);
    const auto floats = [&](size_t width) { return Buffer(b, width * rows * sizeof(float), "activations"); };
    x = floats(w.hidden);
    h = floats(w.hidden);
    q_a = floats(w.q_a);
    q = floats(w.q);
    ckv = floats(w.ckv);
    q_latent = floats(w.q_latent);
    o_latent = floats(w.o_latent);
    o = floats(w.o);
    act = floats(w.act);
    shared = floats(w.hidden);
    expert = floats(w.top_k);
    weight = floats(w.top_k);
    picked = Buffer(b, w.hidden * logit_rows * sizeof(float), "activations");
}

size_t ForwardScratch::bytes(const ModelConfig& config, int rows, int logit_rows) {
    const Widths w(config);
    const size_t per_row =
        3 * w.hidden + w.q_a + w.q + w.ckv + w.q_latent + w.o_latent + w.o + w.act + 2 * w.top_k;
    return (per_row * rows + w.hidden * logit_rows) * sizeof(float);
}

int ForwardScratch::widest_input(const ModelConfig& config) {
    const Widths w(config);
    return static_cast<int>(std::max({w.hidden, w.q_a, w.q, w.o_latent, w.o, w.act}));
}

namespace {

// x += o_proj( attention( input_norm(x) ) ), DeepSeek-V2 (arXiv 2405.04434), section 2.1, with kv_b absorbed
// into q and o.
// `tap`: where x goes on the way, with the rows of all taps that far apart.
void attention_block(Backend& b, const ModelConfig& c, const LayerWeights& w, const LatentCache& cache,
                     ForwardScratch& s, const ForwardArgs& a, float* tap, int tap_stride) {
    float* x = s.x.as<float>();
    float* h = s.h.as<float>();
    const float eps = static_cast<float>(c.rms_norm_eps), latent_eps = static_cast<float>(c.latent_norm_eps);
    const int heads = c.num_attention_heads, nope = c.qk_nope_head_dim, rope = c.qk_rope_head_dim;
    const int latent = c.kv_lora_rank, v = c.v_head_dim;

    b.rms_norm({a.rows, x, c.hidden_size, w.input_norm, eps, c.hidden_size, h, tap, tap_stride});

    // latent and shared rope key, written to the cache before anyone reads it
    b.aside([&] {
        float* ckv = s.ckv.as<float>();
        b.linear({a.rows, h, w.kv_a, ckv, false});
        b.write_latent({a.rows, a.batch, ckv, w.kv_a_norm, latent_eps, latent, a.rope, cache});
    });

    // query, through its low-rank bottleneck where there is one
    float* q = s.q.as<float>();
    if (c.q_lora_rank > 0) {
        float* q_a = s.q_a.as<float>();
        b.linear({a.rows, h, w.q_a, q_a, false});
        b.rms_norm({a.rows, q_a, c.q_lora_rank, w.q_a_norm, latent_eps, c.q_lora_rank, q_a});
        b.linear({a.rows, q_a, w.q_b, q, false});
    } else {
        b.linear({a.rows, h, w.q_b, q, false});
    }

    // attention in latent space
    float* q_latent = s.q_latent.as<float>();
    float* o_latent = s.o_latent.as<float>();
    float* o = s.o.as<float>();
    b.absorb_query({a.rows, a.batch, q, w.key_up, heads, nope, latent, a.rope, q_latent});
    b.join_aside();
    b.attend({a.rows, a.batch, q_latent, cache, heads, latent, rope, static_cast<float>(c.softmax_scale()),
              o_latent});
    b.project_value({a.rows, o_latent, w.value_up, heads, latent, v, o});

    b.linear({a.rows, o, w.o, x, true});
    b.reduce_ranks(a.rows, x, c.hidden_size);
}

// x += mlp( post_attention_norm(x) ): one gated MLP, or routed experts and the shared one (arXiv 2412.19437,
// section 2.1.2).
void mlp_block(Backend& b, const ModelConfig& c, const LayerWeights& w, bool moe, ForwardScratch& s,
               const ForwardArgs& a) {
    float* x = s.x.as<float>();
    float* h = s.h.as<float>();
    float* act = s.act.as<float>();
    b.rms_norm({a.rows, x, c.hidden_size, w.post_attention_norm, static_cast<float>(c.rms_norm_eps),
                c.hidden_size, h});

    if (!moe) {
        b.gated_linear({a.rows, h, w.gate, w.up, act});
        b.linear({a.rows, act, w.down, x, true});
    } else {
        float* shared = nullptr;
        if (c.n_shared_experts > 0) {
            shared = s.shared.as<float>();
            b.aside([&] {
                b.gated_linear({a.rows, h, w.shared_gate, w.shared_up, act});
                b.linear({a.rows, act, w.shared_down, shared, false});
            });
        }
        int32_t* expert = s.expert.as<int32_t>();
        float* weight = s.weight.as<float>();
        b.route({a.rows, h, w.router, w.router_bias, c.scoring, c.num_experts_per_tok, c.n_group,
                 c.topk_group, c.norm_topk_prob, static_cast<float>(c.routed_scaling_factor), expert,
                 weight});
        b.experts({a.rows, h, w.experts, expert, weight, c.num_experts_per_tok, shared, x});
    }
    b.reduce_ranks(a.rows, x, c.hidden_size);
}

int tap_width(const ForwardArgs& a) {
    return a.tap_layers == nullptr ? 0 : static_cast<int>(a.tap_layers->size());
}

// Where the taps after a layer go: null where nobody wants them.
float* tap_after(const ModelConfig& c, int layer, const ForwardArgs& a) {
    if (a.want_taps.rows.capacity == 0) return nullptr;
    for (int t = 0; t < tap_width(a); ++t)
        if ((*a.tap_layers)[t] == layer) return a.taps + static_cast<size_t>(t) * c.hidden_size;
    return nullptr;
}

}  // namespace

bool forward(Backend& b, const ModelConfig& c, const ModelWeights& weights, ForwardScratch& s,
             const ForwardArgs& a) {
    b.embed({a.rows, a.batch.token, weights.embed, s.x.as<float>()});

    // Taps of every row ride on the norm that reads the same rows next.
    const int stride = tap_width(a) * c.hidden_size;
    float* x = s.x.as<float>();
    float* riding = nullptr;
    for (int i = 0; i < c.num_hidden_layers; ++i) {
        if (a.cancelled && a.cancelled()) return false;
        attention_block(b, c, weights.layers[i], (*a.caches)[i], s, a, riding, stride);
        mlp_block(b, c, weights.layers[i], c.is_moe(i), s, a);
        riding = tap_after(c, i, a);
        if (riding != nullptr && a.want_taps.index != nullptr) {
            b.gather_rows({a.want_taps.rows, a.want_taps.index, x, c.hidden_size, riding, stride});
            riding = nullptr;
        }
    }

    if (a.want_logits.rows.capacity > 0) {
        float* picked = s.picked.as<float>();
        const float eps = static_cast<float>(c.rms_norm_eps);
        if (a.want_logits.index == nullptr) {
            b.rms_norm({a.rows, x, c.hidden_size, weights.norm, eps, c.hidden_size, picked, riding, stride});
            riding = nullptr;
        } else {
            b.gather_rows({a.want_logits.rows, a.want_logits.index, x, c.hidden_size, picked, c.hidden_size});
            b.rms_norm({a.want_logits.rows, picked, c.hidden_size, weights.norm, eps, c.hidden_size, picked});
        }
        b.linear({a.want_logits.rows, picked, weights.head, a.logits, false});
    }
    if (riding != nullptr)  // no norm came that reads every row
        b.rms_norm({a.rows, x, c.hidden_size, weights.norm, static_cast<float>(c.rms_norm_eps), c.hidden_size,
                    s.h.as<float>(), riding, stride});
    return true;
}

}  // namespace kdt
