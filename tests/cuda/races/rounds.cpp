// Whole rounds: a random model's forwards, trees and commits through the engine, its kernels one after
// another as they are in use. Here a kernel that reads before grid_wait what an earlier one writes has such
// an earlier one.
#include "../kernels/testing.h"
#include "draft/planted.h"
#include "engine/session.h"
#include "tools/random_model.h"

namespace kdt::testing {

namespace {

std::vector<int32_t> decode(const std::shared_ptr<Executor>& executor, int vocab, int budget, bool sampled,
                            std::shared_ptr<Drafter> drafter) {
    Session session(executor);
    std::vector<int32_t> prompt;
    for (int i = 0; i < 11; ++i) prompt.push_back(i * 37 % vocab);
    session.append(prompt);
    GenerateParams params;
    params.max_tokens = 4;
    params.budget = budget;
    params.drafter = std::move(drafter);
    if (sampled) params.sample = {0.8f, 40, 0.95f, 0.0f, 7, 0};
    session.begin(params);
    for (;;) {
        const StepResult step = session.step();
        if (step.finish == Finish::error) failed("%s", step.error.c_str());
        if (step.finish != Finish::none) return session.tokens();
    }
}

void rounds(const char* precision, bool sampled) {
    DeviceOptions device;
    device.device = "cuda";
    device.precision = precision;
    const auto engine = random_engine(shape_fields("tiny", 2), device, 5);
    const int vocab = engine->config().vocab_size;
    ExecutorOptions limits;
    limits.context = 32;
    const auto executor = std::make_shared<Executor>(engine, limits);
    const auto plain = decode(executor, vocab, 0, sampled, nullptr);
    PlantedOptions planted;
    planted.seed = 11;
    expect_same(decode(executor, vocab, 12, sampled, std::make_shared<PlantedDrafter>(plain, vocab, planted)),
                plain, precision);
}

}  // namespace

KDT_CASE(rounds_of_a_model_in_bf16) {
    rounds("bf16", false);
}
KDT_CASE(rounds_of_a_model_in_f32_and_sampled) {
    rounds("f32", true);
}

}  // namespace kdt::testing
