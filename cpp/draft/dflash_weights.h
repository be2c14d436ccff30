// The tensors of a DFlash draft model by their published names, checked and uploaded one at a time.
// Embedding and head are the target's: the checkpoint has none.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "core/tensor.h"
#include "draft/dflash_config.h"

namespace kdt {

struct DFlashLayer {
    const float* input_norm = nullptr;
    Weight q, k, v, o;
    const float* q_norm = nullptr;  // [head_dim]
    const float* k_norm = nullptr;
    const float* post_attention_norm = nullptr;
    Weight gate, up, down;
};

struct DFlashWeights {
    Weight fc;                           // [hidden, tap_width]
    const float* hidden_norm = nullptr;  // of the features
    std::vector<DFlashLayer> layers;
    const float* norm = nullptr;  // before the target's head
};

// A draft model: immutable, beside its target on one backend.
struct DFlashModel {
    DFlashConfig config;
    DFlashWeights weights;
    Weight embed, head;  // the target's
};

class DFlashLoader {
  public:
    DFlashLoader(const DFlashConfig& config, Backend& backend);
    const DFlashConfig& config() const { return config_; }

    // Names and shapes, without the optional prefix "model.".
    std::vector<std::pair<std::string, std::vector<int64_t>>> expected() const;
    // f32 or bf16. Each expected tensor once; anything else is an error that names it.
    void add(const std::string& name, const TensorView& tensor);
    // Throws when a tensor is missing.
    DFlashWeights finish();

  private:
    struct Slot {
        std::vector<int64_t> shape;
        Weight* matrix = nullptr;  // exactly one of the two
        const float** vector = nullptr;
        bool bound = false;
    };
    void expect(const std::string& name, std::vector<int64_t> shape, Weight* matrix);
    void expect(const std::string& name, int64_t n, const float** vector);

    const DFlashConfig config_;
    Backend& backend_;
    DFlashWeights weights_;
    std::map<std::string, Slot> slots_;
};

}  // namespace kdt
