// What one forward has to read, for figures of bandwidth: from the weights as they lie on the device.
#pragma once

#include <cstddef>

namespace kdt {

class Engine;

// A forward over r rows reads `dense`, `head` where some row's logits are wanted, `embed_row` for each row,
// and in every MoE layer each expert that some row chose: `expert` sums one expert of every MoE layer, so r =
// 1 reads `top_k` times that, and r rows between `top_k` and min(r * top_k, experts) times. The latents of p
// positions are p * `position` bytes for one sequence.
struct Footprint {
    size_t dense = 0;  // attention, norms, dense and shared MLPs, routers
    size_t head = 0;
    size_t embed_row = 0;  // of the embedding
    size_t expert = 0;
    size_t position = 0;  // latents of one position in all layers
    int experts = 0, top_k = 0, moe_layers = 0;
};

Footprint footprint(const Engine& engine);

}  // namespace kdt
