#include "tools/random_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/error.h"

namespace kdt {

namespace {

uint16_t narrow_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// Random words and unit-variance values, drawn once and handed out from random offsets: filling hundreds of
// GB value by value would take longer than the test.
class Pool {
  public:
    explicit Pool(uint64_t seed) : random_(seed), words_(kSize), values_(kSize) {
        for (uint32_t& w : words_) w = static_cast<uint32_t>(random_.next() >> 32);
        for (float& v : values_) {
            // The sum of four uniforms, scaled to variance 1.
            float sum = -2.0f;
            const uint64_t bits = random_.next();
            for (int i = 0; i < 4; ++i) sum += static_cast<float>((bits >> (16 * i)) & 0xFFFF) / 65536.0f;
            v = sum * 1.7320508f;
        }
    }

    void fill_words(std::vector<int32_t>& out) {
        tile(out.size(), [&](size_t at, size_t from, size_t n) {
            std::memcpy(out.data() + at, words_.data() + from, n * sizeof(int32_t));
        });
    }

    void fill_bf16(std::vector<uint16_t>& out, float scale, float offset) {
        tile(out.size(), [&](size_t at, size_t from, size_t n) {
            for (size_t i = 0; i < n; ++i) out[at + i] = narrow_bf16(values_[from + i] * scale + offset);
        });
    }

  private:
    static constexpr size_t kSize = size_t{1} << 20;

    template <class Copy>
    void tile(size_t total, const Copy& copy) {
        for (size_t at = 0; at < total;) {
            const size_t from = random_.next() % kSize;
            const size_t n = std::min(total - at, kSize - from);
            copy(at, from, n);
            at += n;
        }
    }

    SplitMix random_;
    std::vector<uint32_t> words_;
    std::vector<float> values_;
};

}  // namespace

std::map<std::string, double> shape_fields(const std::string& shape, int layers) {
    std::map<std::string, double> f = {{"vocab_size", 163840},
                                       {"hidden_size", 7168},
                                       {"num_hidden_layers", 3},
                                       {"num_attention_heads", 64},
                                       {"q_lora_rank", 1536},
                                       {"kv_lora_rank", 512},
                                       {"qk_nope_head_dim", 128},
                                       {"qk_rope_head_dim", 64},
                                       {"v_head_dim", 128},
                                       {"intermediate_size", 18432},
                                       {"moe_intermediate_size", 2048},
                                       {"n_routed_experts", 384},
                                       {"num_experts_per_tok", 8},
                                       {"n_shared_experts", 1},
                                       {"first_k_dense_replace", 1},
                                       {"n_group", 1},
                                       {"topk_group", 1},
                                       {"scoring", 0},
                                       {"norm_topk_prob", 1},
                                       {"routed_scaling_factor", 2.827},
                                       {"rms_norm_eps", 1e-5},
                                       {"latent_norm_eps", 1e-6},
                                       {"rope_theta", 50000},
                                       {"rope_interleave", 1},
                                       {"rope_factor", 64},
                                       {"rope_original_max_position_embeddings", 4096},
                                       {"rope_beta_fast", 32},
                                       {"rope_beta_slow", 1},
                                       {"rope_mscale", 1},
                                       {"rope_mscale_all_dim", 1},
                                       {"max_position_embeddings", 262144}};
    if (shape == "moonlight" || shape == "tiny") {
        for (const char* key : {"rope_factor", "rope_original_max_position_embeddings", "rope_beta_fast",
                                "rope_beta_slow", "rope_mscale", "rope_mscale_all_dim", "q_lora_rank"})
            f[key] = 0;
        f["hidden_size"] = 2048;
        f["num_hidden_layers"] = 27;
        f["num_attention_heads"] = 16;
        f["intermediate_size"] = 11264;
        f["moe_intermediate_size"] = 1408;
        f["n_routed_experts"] = 64;
        f["num_experts_per_tok"] = 6;
        f["n_shared_experts"] = 2;
        f["routed_scaling_factor"] = 2.446;
        f["max_position_embeddings"] = 65536;
    }
    if (shape == "tiny") {
        f["vocab_size"] = 4096;
        f["hidden_size"] = 256;
        f["num_hidden_layers"] = 3;
        f["num_attention_heads"] = 8;
        f["kv_lora_rank"] = 128;
        f["qk_nope_head_dim"] = 32;
        f["qk_rope_head_dim"] = 16;
        f["v_head_dim"] = 32;
        f["intermediate_size"] = 512;
        f["moe_intermediate_size"] = 128;
        f["n_routed_experts"] = 16;
        f["num_experts_per_tok"] = 4;
    } else if (shape != "k2" && shape != "moonlight") {
        fail(ErrorCode::invalid_argument, "shape is '%s'; expected tiny, moonlight or k2", shape.c_str());
    }
    if (layers > 0) f["num_hidden_layers"] = layers;
    return f;
}

std::shared_ptr<const Engine> random_engine(const std::map<std::string, double>& fields,
                                            const DeviceOptions& device, uint64_t seed) {
    EngineBuilder builder(fields, device);
    Pool pool(seed);
    std::vector<int32_t> words;
    std::vector<uint16_t> values;
    for (const ExpectedTensor& t : builder.loader().expected()) {
        const int64_t rows = t.shape[0], width = t.shape.size() == 2 ? t.shape[1] : 1;
        const auto view = [&](DType dtype, const void* data, std::vector<int64_t> shape) {
            TensorView v;
            v.dtype = dtype;
            v.shape = std::move(shape);
            v.data = data;
            v.bytes = static_cast<size_t>(v.elements()) * dtype_size(dtype);
            return v;
        };
        if (t.name.find(".experts.") != std::string::npos) {
            words.resize(rows * width / 8);
            values.resize(rows * width / kGroupSize);
            pool.fill_words(words);
            // Nibbles are uniform with a standard deviation of about 4.6.
            pool.fill_bf16(values, 0.05f / std::sqrt(static_cast<float>(width)),
                           0.33f / std::sqrt(static_cast<float>(width)));
            builder.loader().add_w4a16(t.name.substr(0, t.name.size() - 7),
                                       view(DType::i32, words.data(), {rows, width / 8}),
                                       view(DType::bf16, values.data(), {rows, width / kGroupSize}));
            continue;
        }
        values.resize(rows * width);
        if (t.shape.size() == 1) {
            const bool bias = t.name.find("bias") != std::string::npos;
            pool.fill_bf16(values, bias ? 0.02f : 0.1f, bias ? 0.0f : 1.0f);
        } else if (t.name.find("embed_tokens") != std::string::npos) {
            pool.fill_bf16(values, 1.0f, 0.0f);
        } else {
            pool.fill_bf16(values, 1.5f / std::sqrt(static_cast<float>(width)), 0.0f);
        }
        builder.loader().add(t.name, view(DType::bf16, values.data(), t.shape));
    }
    return builder.finish();
}

}  // namespace kdt
