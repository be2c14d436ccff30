// Engine: an immutable model on one device. Everything that changes while text is generated lives in
// executors and sessions.
#pragma once

#include <map>
#include <memory>
#include <string>

#include "backend/backend.h"
#include "draft/dflash_weights.h"
#include "engine/budget.h"
#include "engine/turns.h"
#include "model/config.h"
#include "model/weights.h"

namespace kdt {

// "cpu", "cuda" or "cuda:N".
struct DeviceOptions {
    std::string device = "cpu";
    int threads = 0;        // CPU: 0 for one per usable core
    std::string isa;        // CPU: "" for the best
    std::string precision;  // of GEMM operands and cache: "" for the device's default; "f32" everywhere,
                            // "bf16" on CUDA
};

std::unique_ptr<Backend> make_backend(const DeviceOptions& options);

class Engine {
  public:
    const ModelConfig& config() const { return config_; }
    const ModelWeights& weights() const { return weights_; }
    // Ops are ordered, but for those aside, and executors of one engine share the workspaces: whoever calls
    // it, or anything below that changes, has the turn.
    Backend& backend() const { return *backend_; }
    Turns& turns() const { return turns_; }
    // The draft model that was loaded beside the target; null where there is none.
    const DFlashModel* draft_model() const { return draft_model_.get(); }
    // What a verify costs on this device: measured once, refined while running. With the records of drafts
    // the one thing here that changes; it decides how many nodes are verified and never reaches the output.
    CostTable& costs() const { return costs_; }
    // What drafts of the drafter called so have brought: a generation starts from it, and leaves here what it
    // has learned when it ends. While it runs, its text is its own: one that went on for long would keep out
    // what every short one beside it has learned. Like the costs, it never reaches the output.
    DraftRecord& draft_record(const std::string& drafter) const { return draft_records_[drafter]; }

  private:
    friend class EngineBuilder;
    Engine(std::unique_ptr<Backend> backend, const ModelConfig& config)
        : backend_(std::move(backend)), config_(config) {}

    std::unique_ptr<Backend> backend_;
    const ModelConfig config_;
    ModelWeights weights_;
    std::unique_ptr<DFlashModel> draft_model_;
    mutable Turns turns_;
    mutable CostTable costs_;
    mutable std::map<std::string, DraftRecord> draft_records_;
};

// Streams a checkpoint into an engine, one tensor at a time.
class EngineBuilder {
  public:
    EngineBuilder(const std::map<std::string, double>& config, const DeviceOptions& options);
    WeightLoader& loader();  // throws once `finish` has been called
    // A draft model beside the target: at most one, before `finish`. Its loader takes no tensor after that.
    std::shared_ptr<DFlashLoader> add_draft_model(const DFlashConfig& config);
    const ModelConfig& config() const { return engine_->config(); }
    size_t memory_available() { return loader().backend().memory_available(); }
    std::shared_ptr<const Engine> finish();

  private:
    std::shared_ptr<Engine> engine_;
    std::unique_ptr<WeightLoader> loader_;
    std::shared_ptr<DFlashLoader> draft_loader_;
};

}  // namespace kdt
