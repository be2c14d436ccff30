// Names to typed weights. Binding a weight is checking it: name, dtype and shape, all against the config.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/tensor.h"
#include "model/config.h"
#include "model/dequantize.h"

namespace kdt {

struct LayerWeights {
    const float* input_norm = nullptr;           // [hidden]
    Weight q_a;                                  // [q_lora, hidden]; none when q_lora_rank is 0
    const float* q_a_norm = nullptr;             // [q_lora]
    Weight q_b;                                  // [heads * (nope + rope), q_lora], or q_proj [.., hidden]
    Weight kv_a;                                 // [latent + rope, hidden]
    const float* kv_a_norm = nullptr;            // [latent]
    Weight key_up;                               // [heads * latent, nope]: kv_b's K rows, transposed per head
    Weight value_up;                             // [heads * v, latent]: kv_b's V rows
    Weight o;                                    // [hidden, heads * v]
    const float* post_attention_norm = nullptr;  // [hidden]
    Weight gate, up, down;               // dense layer: [intermediate, hidden] twice, [hidden, intermediate]
    Weight router;                       // MoE layer: [experts, hidden]
    const float* router_bias = nullptr;  // [experts]; none for softmax_greedy
    ExpertSet experts;
    size_t expert_bytes = 0;  // of one routed expert: codes and scales of its three matrices
    Weight shared_gate, shared_up, shared_down;  // one MLP of n_shared_experts * moe_intermediate
};

struct ModelWeights {
    Weight embed;  // [vocab, hidden]
    std::vector<LayerWeights> layers;
    const float* norm = nullptr;  // [hidden]
    Weight head;                  // [vocab, hidden]
};

// What one tensor of a checkpoint must look like.
struct ExpectedTensor {
    std::string name;            // with .weight, or .bias of the router
    std::vector<int64_t> shape;  // [out, in] or [n]
    bool may_be_int4 = false;    // NAME.qw and NAME.sc may stand for NAME.weight
};

class WeightLoader {
  public:
    WeightLoader(const ModelConfig& config, Backend& backend);

    std::vector<ExpectedTensor> expected() const;
    Backend& backend() const { return backend_; }
    // f32 or bf16. Each expected tensor once; anything else is an error that names it.
    void add(const std::string& name, const TensorView& tensor);
    // `module` is the name without .weight. qw: i32 [out, in / 8]; sc: f32 or bf16 [out, in / 32]. Stays INT4
    // with `exact` rounding, but for kv_b, which is absorbed into its neighbours and becomes f32.
    void add_w4a16(const std::string& module, const TensorView& qw, const TensorView& sc,
                   Rounding rounding = Rounding::exact);
    // codes: u8 [out, in], fp8 e4m3; scales: f32 [ceil(out / 128), ceil(in / 128)]. Dequantised here.
    void add_fp8(const std::string& name, const TensorView& codes, const TensorView& scales,
                 Rounding rounding = Rounding::exact);
    // Throws when a tensor is missing.
    ModelWeights finish();

  private:
    struct Slot {
        std::vector<int64_t> shape;
        bool may_be_int4 = false;
        bool bound = false;
        Weight* matrix = nullptr;  // exactly one of matrix, vector, kv_b_layer
        const float** vector = nullptr;
        int kv_b_layer = -1;
    };
    struct LayerExperts {
        std::vector<Weight> gate, up, down;
    };

    void expect_matrix(const std::string& module, int64_t out, int64_t in, Weight* target,
                       bool may_be_int4 = true);
    void expect_vector(const std::string& name, int64_t n, const float** target);
    void expect_layer(int layer);
    Slot& claim(const std::string& name, const std::string& given_as);
    void add_kv_b(const std::string& name, int layer, const TensorView& tensor);

    const ModelConfig config_;
    Backend& backend_;
    ModelWeights weights_;
    std::vector<LayerExperts> experts_;
    std::map<std::string, Slot> slots_;
};

}  // namespace kdt
