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

std::shared_ptr<const Engine> EngineBuilder::finish() {
    engine_->weights_ = loader().finish();
    loader_.reset();
    return std::move(engine_);
}

}  // namespace kdt
