#include "draft/dflash_weights.h"

#include "core/error.h"

namespace kdt {

DFlashLoader::DFlashLoader(const DFlashConfig& config, Backend& backend)
    : config_(config), backend_(backend) {
    const DFlashConfig& c = config_;
    const int64_t hidden = c.hidden_size;
    expect("fc.weight", {hidden, c.tap_width()}, &weights_.fc);
    expect("hidden_norm.weight", hidden, &weights_.hidden_norm);
    expect("norm.weight", hidden, &weights_.norm);
    weights_.layers.resize(c.num_hidden_layers);
    for (int i = 0; i < c.num_hidden_layers; ++i) {
        DFlashLayer& w = weights_.layers[i];
        const std::string base = "layers." + std::to_string(i) + ".";
        const std::string attention = base + "self_attn.", mlp = base + "mlp.";
        expect(base + "input_layernorm.weight", hidden, &w.input_norm);
        expect(attention + "q_proj.weight", {c.query_width(), hidden}, &w.q);
        expect(attention + "k_proj.weight", {c.key_width(), hidden}, &w.k);
        expect(attention + "v_proj.weight", {c.key_width(), hidden}, &w.v);
        expect(attention + "o_proj.weight", {hidden, c.query_width()}, &w.o);
        expect(attention + "q_norm.weight", c.head_dim, &w.q_norm);
        expect(attention + "k_norm.weight", c.head_dim, &w.k_norm);
        expect(base + "post_attention_layernorm.weight", hidden, &w.post_attention_norm);
        expect(mlp + "gate_proj.weight", {c.intermediate_size, hidden}, &w.gate);
        expect(mlp + "up_proj.weight", {c.intermediate_size, hidden}, &w.up);
        expect(mlp + "down_proj.weight", {hidden, c.intermediate_size}, &w.down);
    }
}

void DFlashLoader::expect(const std::string& name, std::vector<int64_t> shape, Weight* matrix) {
    Slot slot;
    slot.shape = std::move(shape);
    slot.matrix = matrix;
    slots_[name] = std::move(slot);
}

void DFlashLoader::expect(const std::string& name, int64_t n, const float** vector) {
    Slot slot;
    slot.shape = {n};
    slot.vector = vector;
    slots_[name] = std::move(slot);
}

std::vector<std::pair<std::string, std::vector<int64_t>>> DFlashLoader::expected() const {
    std::vector<std::pair<std::string, std::vector<int64_t>>> list;
    for (const auto& [name, slot] : slots_) list.emplace_back(name, slot.shape);
    return list;
}

void DFlashLoader::add(const std::string& name, const TensorView& tensor) {
    const auto it = slots_.find(name);
    if (it == slots_.end())
        fail(ErrorCode::bad_model, "tensor %s is not one of a DFlash draft model's", name.c_str());
    Slot& slot = it->second;
    if (slot.bound) fail(ErrorCode::bad_model, "tensor %s was given twice", name.c_str());
    if (tensor.dtype != DType::f32 && tensor.dtype != DType::bf16)
        fail(ErrorCode::bad_model, "tensor %s has dtype %s; expected f32 or bf16", name.c_str(),
             dtype_name(tensor.dtype));
    if (tensor.shape != slot.shape)
        fail(ErrorCode::bad_model, "tensor %s has shape %s; expected %s", name.c_str(),
             shape_text(tensor.shape).c_str(), shape_text(slot.shape).c_str());
    const bool wide = tensor.dtype == DType::f32;
    if (slot.vector != nullptr) {
        std::vector<float> values(static_cast<size_t>(tensor.elements()));
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = wide ? static_cast<const float*>(tensor.data)[i]
                             : widen_bf16(static_cast<const uint16_t*>(tensor.data)[i]);
        *slot.vector = backend_.upload_vector(values, name);
    } else {
        HostMatrix m;
        m.kind = wide ? WeightKind::f32 : WeightKind::bf16;
        m.out = static_cast<int>(slot.shape[0]);
        m.in = static_cast<int>(slot.shape[1]);
        m.data = tensor.data;
        *slot.matrix = backend_.upload_matrix(m, name);
    }
    slot.bound = true;
}

DFlashWeights DFlashLoader::finish() {
    size_t missing = 0;
    const std::string* first = nullptr;
    for (const auto& [name, slot] : slots_)
        if (!slot.bound && missing++ == 0) first = &name;
    if (missing > 0)
        fail(ErrorCode::bad_model, "%zu of %zu tensors of the draft model are missing, the first is %s",
             missing, slots_.size(), first->c_str());
    return weights_;
}

}  // namespace kdt
