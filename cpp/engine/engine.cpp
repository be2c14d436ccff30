#include "engine/engine.h"

#include "core/error.h"

namespace kdt {

std::unique_ptr<Backend> make_backend(const DeviceOptions& options) {
    const std::string& precision = options.precision;
    if (!precision.empty() && precision != "f32" && precision != "bf16")
        fail(ErrorCode::invalid_argument, "precision is '%s'; expected f32 or bf16", precision.c_str());
    if (options.device == "cpu") {
        if (precision == "bf16")
            fail(ErrorCode::unsupported, "precision is bf16; the CPU backend computes in f32");
        CpuOptions cpu;
        cpu.threads = options.threads;
        cpu.isa = options.isa;
        return make_cpu_backend(cpu);
    }
    CudaOptions cuda;
    if (!precision.empty()) cuda.precision = precision;
    if (options.device.rfind("cuda:", 0) == 0) {
        const std::string number = options.device.substr(5);
        if (number.empty() || number.size() > 3 ||
            number.find_first_not_of("0123456789") != std::string::npos)
            fail(ErrorCode::invalid_argument, "device is '%s'; expected cpu, cuda or cuda:N",
                 options.device.c_str());
        cuda.device = std::stoi(number);
    } else if (options.device != "cuda") {
        fail(ErrorCode::invalid_argument, "device is '%s'; expected cpu, cuda or cuda:N",
             options.device.c_str());
    }
    return make_cuda_backend(cuda);
}

EngineBuilder::EngineBuilder(const std::map<std::string, double>& config, const DeviceOptions& options) {
    const ModelConfig checked = ModelConfig::from_fields(config);
    engine_.reset(new Engine(make_backend(options), checked));
    loader_ = std::make_unique<WeightLoader>(engine_->config(), engine_->backend());
}

WeightLoader& EngineBuilder::loader() {
    if (!loader_) fail(ErrorCode::invalid_argument, "this builder has already made its engine");
    return *loader_;
}

std::shared_ptr<DFlashLoader> EngineBuilder::add_draft_model(const DFlashConfig& config) {
    loader();  // throws once the engine is made
    if (draft_loader_) fail(ErrorCode::invalid_argument, "this builder already has a draft model");
    if (!engine_->backend().has_draft_ops())
        fail(ErrorCode::unsupported, "the %s backend of this version runs no draft model",
             engine_->backend().name().c_str());
    const ModelConfig& target = engine_->config();
    config.check_target(target.hidden_size, target.vocab_size, target.num_hidden_layers);
    draft_loader_ = std::make_shared<DFlashLoader>(config, engine_->backend());
    return draft_loader_;
}

namespace {

// A drafter sees its masks as this row of the target's embedding. Some checkpoints leave it empty and ship
// the trained row beside them; drafting with zeros looks like a weak drafter and nothing else.
void check_mask_row(Backend& backend, const Weight& embed, int token) {
    const int32_t one = 1;
    const Buffer live(backend, sizeof one, "mask row"), id(backend, sizeof token, "mask row");
    const Buffer row(backend, static_cast<size_t>(embed.in) * sizeof(float), "mask row");
    backend.upload(live.as<int32_t>(), &one, sizeof one);
    backend.upload(id.as<int32_t>(), &token, sizeof token);
    backend.embed({{1, live.as<int32_t>()}, id.as<int32_t>(), embed, row.as<float>()});
    std::vector<float> values(embed.in);
    backend.download(values.data(), row.as<float>(), values.size() * sizeof(float));
    for (const float v : values)
        if (v != 0.0f) return;
    fail(ErrorCode::unsupported,
         "row %d of the target's embedding, the draft model's mask token, is all zeros: the draft model was "
         "trained with a mask embedding of its own, which this version does not read",
         token);
}

}  // namespace

std::shared_ptr<const Engine> EngineBuilder::finish() {
    engine_->weights_ = loader().finish();
    if (draft_loader_) {
        const ModelWeights& target = engine_->weights_;
        const DFlashConfig& config = draft_loader_->config();
        check_mask_row(engine_->backend(), target.embed, config.mask_token_id);
        engine_->draft_model_ = std::make_unique<DFlashModel>(
            DFlashModel{config, draft_loader_->finish(), target.embed, target.head});
    }
    loader_.reset();
    draft_loader_.reset();
    return std::move(engine_);
}

}  // namespace kdt
