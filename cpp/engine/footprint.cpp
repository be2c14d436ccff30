#include "engine/footprint.h"

#include "engine/engine.h"

namespace kdt {

Footprint footprint(const Engine& engine) {
    const ModelConfig& c = engine.config();
    const ModelWeights& w = engine.weights();
    const auto floats = [](int n) { return static_cast<size_t>(n) * sizeof(float); };
    Footprint f;
    f.embed_row = matrix_bytes(w.embed) / static_cast<size_t>(w.embed.out);
    f.head = matrix_bytes(w.head) + floats(c.hidden_size);
    for (const LayerWeights& l : w.layers) {
        for (const Weight* m : {&l.q_a, &l.q_b, &l.kv_a, &l.key_up, &l.value_up, &l.o, &l.gate, &l.up,
                                &l.down, &l.router, &l.shared_gate, &l.shared_up, &l.shared_down})
            if (*m) f.dense += matrix_bytes(*m);
        f.dense += floats(2 * c.hidden_size + c.kv_lora_rank + (l.q_a ? c.q_lora_rank : 0));
        if (l.router_bias != nullptr) f.dense += floats(c.n_routed_experts);
        if (l.experts.count == 0) continue;
        f.expert += l.expert_bytes;
        ++f.moe_layers;
    }
    if (f.moe_layers > 0) {
        f.experts = c.n_routed_experts;
        f.top_k = c.num_experts_per_tok;
    }
    f.position = dtype_size(engine.backend().cache_dtype()) * static_cast<size_t>(c.num_hidden_layers) *
                 static_cast<size_t>(c.kv_lora_rank + c.qk_rope_head_dim);
    return f;
}

}  // namespace kdt
