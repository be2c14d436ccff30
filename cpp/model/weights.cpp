#include "model/weights.h"

#include "core/error.h"

namespace kdt {

namespace {

void check_shape(const std::string& name, const std::vector<int64_t>& got,
                 const std::vector<int64_t>& wanted) {
    if (got != wanted)
        fail(ErrorCode::bad_model, "tensor %s has shape %s; expected %s", name.c_str(),
             shape_text(got).c_str(), shape_text(wanted).c_str());
}

void check_float(const std::string& name, DType dtype) {
    if (dtype != DType::f32 && dtype != DType::bf16)
        fail(ErrorCode::bad_model, "tensor %s has dtype %s; expected f32 or bf16", name.c_str(),
             dtype_name(dtype));
}

// Copies rows [first, first + n) of each head's block of `per_head` rows of kv_b; `transposed` turns each
// block.
template <class T>
std::vector<T> slice_heads(const T* kv_b, int heads, int per_head, int first, int n, int width,
                           bool transposed) {
    std::vector<T> out(static_cast<size_t>(heads) * n * width);
    for (int h = 0; h < heads; ++h) {
        const T* block = kv_b + (static_cast<size_t>(h) * per_head + first) * width;
        T* to = out.data() + static_cast<size_t>(h) * n * width;
        for (int r = 0; r < n; ++r)
            for (int c = 0; c < width; ++c)
                to[transposed ? static_cast<size_t>(c) * n + r : static_cast<size_t>(r) * width + c] =
                    block[static_cast<size_t>(r) * width + c];
    }
    return out;
}

}  // namespace

WeightLoader::WeightLoader(const ModelConfig& config, Backend& backend) : config_(config), backend_(backend) {
    weights_.layers.resize(config.num_hidden_layers);
    experts_.resize(config.num_hidden_layers);
    expect_matrix("model.embed_tokens", config.vocab_size, config.hidden_size, &weights_.embed, false);
    expect_vector("model.norm.weight", config.hidden_size, &weights_.norm);
    expect_matrix("lm_head", config.vocab_size, config.hidden_size, &weights_.head);
    for (int i = 0; i < config.num_hidden_layers; ++i) expect_layer(i);
}

void WeightLoader::expect_layer(int layer) {
    const ModelConfig& c = config_;
    LayerWeights& w = weights_.layers[layer];
    const std::string base = "model.layers." + std::to_string(layer) + ".";
    const std::string attention = base + "self_attn.";
    const int64_t heads = c.num_attention_heads;

    expect_vector(base + "input_layernorm.weight", c.hidden_size, &w.input_norm);
    if (c.q_lora_rank > 0) {
        expect_matrix(attention + "q_a_proj", c.q_lora_rank, c.hidden_size, &w.q_a);
        expect_vector(attention + "q_a_layernorm.weight", c.q_lora_rank, &w.q_a_norm);
        expect_matrix(attention + "q_b_proj", heads * c.query_head_dim(), c.q_lora_rank, &w.q_b);
    } else {
        expect_matrix(attention + "q_proj", heads * c.query_head_dim(), c.hidden_size, &w.q_b);
    }
    expect_matrix(attention + "kv_a_proj_with_mqa", c.cache_width(), c.hidden_size, &w.kv_a);
    expect_vector(attention + "kv_a_layernorm.weight", c.kv_lora_rank, &w.kv_a_norm);
    // kv_b is absorbed into q and o, one half of it transposed: floating point, dequantised where it is INT4.
    Slot kv_b;
    kv_b.may_be_int4 = true;
    kv_b.shape = {heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank};
    kv_b.kv_b_layer = layer;
    slots_[attention + "kv_b_proj.weight"] = kv_b;
    expect_matrix(attention + "o_proj", c.hidden_size, heads * c.v_head_dim, &w.o);
    expect_vector(base + "post_attention_layernorm.weight", c.hidden_size, &w.post_attention_norm);

    const std::string mlp = base + "mlp.";
    if (!c.is_moe(layer)) {
        expect_matrix(mlp + "gate_proj", c.intermediate_size, c.hidden_size, &w.gate);
        expect_matrix(mlp + "up_proj", c.intermediate_size, c.hidden_size, &w.up);
        expect_matrix(mlp + "down_proj", c.hidden_size, c.intermediate_size, &w.down);
        return;
    }
    expect_matrix(mlp + "gate", c.n_routed_experts, c.hidden_size, &w.router);
    if (c.scoring == Scoring::sigmoid_noaux_tc)
        expect_vector(mlp + "gate.e_score_correction_bias", c.n_routed_experts, &w.router_bias);
    LayerExperts& e = experts_[layer];
    e.gate.resize(c.n_routed_experts);
    e.up.resize(c.n_routed_experts);
    e.down.resize(c.n_routed_experts);
    for (int i = 0; i < c.n_routed_experts; ++i) {
        const std::string expert = mlp + "experts." + std::to_string(i) + ".";
        expect_matrix(expert + "gate_proj", c.moe_intermediate_size, c.hidden_size, &e.gate[i]);
        expect_matrix(expert + "up_proj", c.moe_intermediate_size, c.hidden_size, &e.up[i]);
        expect_matrix(expert + "down_proj", c.hidden_size, c.moe_intermediate_size, &e.down[i]);
    }
    if (c.n_shared_experts > 0) {
        const int64_t width = static_cast<int64_t>(c.n_shared_experts) * c.moe_intermediate_size;
        expect_matrix(mlp + "shared_experts.gate_proj", width, c.hidden_size, &w.shared_gate);
        expect_matrix(mlp + "shared_experts.up_proj", width, c.hidden_size, &w.shared_up);
        expect_matrix(mlp + "shared_experts.down_proj", c.hidden_size, width, &w.shared_down);
    }
}

void WeightLoader::expect_matrix(const std::string& module, int64_t out, int64_t in, Weight* target,
                                 bool may_be_int4) {
    Slot slot;
    slot.shape = {out, in};
    slot.may_be_int4 = may_be_int4;
    slot.matrix = target;
    slots_[module + ".weight"] = slot;
}

void WeightLoader::expect_vector(const std::string& name, int64_t n, const float** target) {
    Slot slot;
    slot.shape = {n};
    slot.vector = target;
    slots_[name] = slot;
}

std::vector<ExpectedTensor> WeightLoader::expected() const {
    std::vector<ExpectedTensor> list;
    list.reserve(slots_.size());
    for (const auto& [name, slot] : slots_) list.push_back({name, slot.shape, slot.may_be_int4});
    return list;
}

WeightLoader::Slot& WeightLoader::claim(const std::string& name, const std::string& given_as) {
    const auto it = slots_.find(name);
    if (it == slots_.end())
        fail(ErrorCode::bad_model, "tensor %s is not one of this model's", given_as.c_str());
    if (it->second.bound) fail(ErrorCode::bad_model, "tensor %s was given twice", given_as.c_str());
    return it->second;
}

void WeightLoader::add(const std::string& name, const TensorView& tensor) {
    Slot& slot = claim(name, name);
    check_float(name, tensor.dtype);
    check_shape(name, tensor.shape, slot.shape);
    if (slot.vector != nullptr) {
        std::vector<float> values(tensor.elements());
        for (size_t i = 0; i < values.size(); ++i)
            values[i] = tensor.dtype == DType::f32 ? static_cast<const float*>(tensor.data)[i]
                                                   : widen_bf16(static_cast<const uint16_t*>(tensor.data)[i]);
        *slot.vector = backend_.upload_vector(values, name);
    } else if (slot.kv_b_layer >= 0) {
        add_kv_b(name, slot.kv_b_layer, tensor);
    } else {
        HostMatrix m;
        m.kind = tensor.dtype == DType::f32 ? WeightKind::f32 : WeightKind::bf16;
        m.out = static_cast<int>(slot.shape[0]);
        m.in = static_cast<int>(slot.shape[1]);
        m.data = tensor.data;
        *slot.matrix = backend_.upload_matrix(m, name);
    }
    slot.bound = true;
}

void WeightLoader::add_kv_b(const std::string& name, int layer, const TensorView& tensor) {
    const ModelConfig& c = config_;
    const int heads = c.num_attention_heads, nope = c.qk_nope_head_dim, v = c.v_head_dim,
              latent = c.kv_lora_rank;
    const auto upload = [&](auto zero) {
        using T = decltype(zero);
        const T* data = static_cast<const T*>(tensor.data);
        const std::vector<T> key = slice_heads(data, heads, nope + v, 0, nope, latent, true);
        const std::vector<T> value = slice_heads(data, heads, nope + v, nope, v, latent, false);
        HostMatrix m;
        m.kind = sizeof(T) == 4 ? WeightKind::f32 : WeightKind::bf16;
        m.out = heads * latent;
        m.in = nope;
        m.data = key.data();
        weights_.layers[layer].key_up = backend_.upload_matrix(m, name);
        m.out = heads * v;
        m.in = latent;
        m.data = value.data();
        weights_.layers[layer].value_up = backend_.upload_matrix(m, name);
    };
    if (tensor.dtype == DType::f32)
        upload(float{});
    else
        upload(uint16_t{});
}

void WeightLoader::add_w4a16(const std::string& module, const TensorView& qw, const TensorView& sc,
                             Rounding rounding) {
    const std::string qw_name = module + ".qw", sc_name = module + ".sc";
    Slot& slot = claim(module + ".weight", qw_name);
    if (!slot.may_be_int4)
        fail(ErrorCode::unsupported, "tensor %s: this matrix must be in floating point (give %s.weight)",
             qw_name.c_str(), module.c_str());
    const int64_t out = slot.shape[0], in = slot.shape[1];
    if (in % kGroupSize != 0)
        fail(ErrorCode::bad_model,
             "tensor %s: the input dimension %lld is not a multiple of the group size %d", qw_name.c_str(),
             static_cast<long long>(in), kGroupSize);
    if (qw.dtype != DType::i32)
        fail(ErrorCode::bad_model, "tensor %s has dtype %s; expected i32", qw_name.c_str(),
             dtype_name(qw.dtype));
    check_float(sc_name, sc.dtype);
    check_shape(qw_name, qw.shape, {out, in / 8});
    check_shape(sc_name, sc.shape, {out, in / kGroupSize});
    if (rounding != Rounding::exact || slot.matrix == nullptr) {
        add(module + ".weight", dequantize_w4a16(qw, sc, rounding, module).view(slot.shape));
        return;
    }
    HostMatrix m;
    m.kind = WeightKind::w4a16;
    m.out = static_cast<int>(out);
    m.in = static_cast<int>(in);
    m.data = qw.data;
    m.scales = sc.data;
    m.scale_dtype = sc.dtype;
    *slot.matrix = backend_.upload_matrix(m, module);
    slot.bound = true;
}

void WeightLoader::add_fp8(const std::string& name, const TensorView& codes, const TensorView& scales,
                           Rounding rounding) {
    Slot& slot = claim(name, name);
    if (slot.vector != nullptr)
        fail(ErrorCode::bad_model, "tensor %s is a vector; only matrices come in fp8", name.c_str());
    if (codes.dtype != DType::u8 || scales.dtype != DType::f32)
        fail(ErrorCode::bad_model,
             "tensor %s has codes of type %s and scales of type %s; expected u8 and f32", name.c_str(),
             dtype_name(codes.dtype), dtype_name(scales.dtype));
    const auto blocks = [](int64_t n) { return (n + kFp8Block - 1) / kFp8Block; };
    check_shape(name, codes.shape, slot.shape);
    check_shape(name + "_scale_inv", scales.shape, {blocks(slot.shape[0]), blocks(slot.shape[1])});
    add(name, dequantize_fp8(codes, scales, rounding, name).view(slot.shape));
}

ModelWeights WeightLoader::finish() {
    size_t missing = 0;
    const std::string* first = nullptr;
    for (const auto& [name, slot] : slots_) {
        if (slot.bound) continue;
        if (missing++ == 0) first = &name;
    }
    if (missing > 0)
        fail(ErrorCode::bad_model, "%zu of %zu tensors are missing, the first is %s", missing, slots_.size(),
             first->c_str());
    for (int i = 0; i < config_.num_hidden_layers; ++i) {
        if (!config_.is_moe(i)) continue;
        const LayerExperts& e = experts_[i];
        weights_.layers[i].expert_bytes =
            matrix_bytes(e.gate[0]) + matrix_bytes(e.up[0]) + matrix_bytes(e.down[0]);
        weights_.layers[i].experts =
            backend_.make_experts(e.gate, e.up, e.down, "model.layers." + std::to_string(i) + ".mlp.experts");
    }
    return weights_;
}

}  // namespace kdt
