// The forward pass (law 3): one function for prompt chunks, plain decoding, tree verification and batches.
#pragma once

#include <functional>
#include <vector>

#include "backend/backend.h"
#include "model/config.h"
#include "model/weights.h"

namespace kdt {

// Activations of one forward over at most `rows` rows.
struct ForwardScratch {
    ForwardScratch(Backend& backend, const ModelConfig& config, int rows, int logit_rows);
    static size_t bytes(const ModelConfig& config, int rows, int logit_rows);
    // Widest row that a matrix product of the forward reads.
    static int widest_input(const ModelConfig& config);

    Buffer x;         // [rows, hidden] residual stream
    Buffer h;         // [rows, hidden] normed input of a block
    Buffer q_a;       // [rows, q_lora]
    Buffer q;         // [rows, heads, nope + rope]
    Buffer ckv;       // [rows, latent + rope]
    Buffer q_latent;  // [rows, heads, latent + rope] absorbed query
    Buffer o_latent;  // [rows, heads, latent]
    Buffer o;         // [rows, heads * v]
    Buffer act;       // [rows, widest of dense and shared intermediate] silu(gate) * up
    Buffer shared;    // [rows, hidden] output of the shared expert
    Buffer expert;    // [rows, top_k] int32
    Buffer weight;    // [rows, top_k]
    Buffer picked;    // [logit_rows, hidden] rows that want logits
};

// Rows that want something from a forward: `index[j]` names a row of the batch. Null: every row.
struct RowSubset {
    Rows rows;
    const int32_t* index = nullptr;  // [rows.capacity]
};

struct ForwardArgs {
    Rows rows;
    RowBatch batch;
    const std::vector<LatentCache>* caches = nullptr;  // one per layer
    RopeTable rope;
    RowSubset want_logits;
    float* logits = nullptr;  // [want_logits.rows, vocab]
    const std::vector<int>* tap_layers =
        nullptr;  // taps: the residual stream after these layers; may be null
    RowSubset want_taps;
    float* taps = nullptr;  // [want_taps.rows, tap_layers->size() * hidden]
    // Called between layers; the forward ends there, returning false, when it says so. May be empty.
    std::function<bool()> cancelled;
};

// Runs all layers. Returns false if it was cancelled: pages then hold latents of no committed position,
// logits nothing.
bool forward(Backend& backend, const ModelConfig& config, const ModelWeights& weights,
             ForwardScratch& scratch, const ForwardArgs& args);

}  // namespace kdt
