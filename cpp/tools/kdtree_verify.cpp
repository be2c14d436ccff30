// kdtree-verify FILE: runs a golden bundle without Python, for sanitizers and bare boxes. Decodes plainly and
// with trees, and compares: plain tokens and logits with the bundle's, tree tokens and logits with the plain
// ones, bit for bit.
//
// Exit codes: 0 all legs passed, 1 a leg failed or an error, 2 wrong usage.

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/error.h"
#include "engine/bundle.h"
#include "engine/session.h"

namespace {

using namespace kdt;

constexpr const char* kUsage =
    "usage: kdtree-verify FILE [--device cpu|cuda[:N]] [--threads N] [--isa NAME] [--precision f32|bf16] "
    "[--budget N]\n"
    "Decodes a golden bundle plainly and with trees of N nodes (64) and compares with what it holds. Bundles "
    "are float32:\n"
    "on a GPU their logits need --precision f32.\n";

struct Options {
    std::string file;
    DeviceOptions device;
    int budget = kMaxNodes;
};

bool parse_int(const char* text, int& value) {
    const char* end = text + std::strlen(text);
    const auto result = std::from_chars(text, end, value);
    return result.ec == std::errc() && result.ptr == end && value >= 0;
}

// False on wrong usage.
bool parse(int argc, char** argv, Options& options) {
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word.rfind("--", 0) != 0) {
            if (!options.file.empty()) return false;
            options.file = word;
            continue;
        }
        if (++i == argc) return false;
        if (word == "--device")
            options.device.device = argv[i];
        else if (word == "--isa")
            options.device.isa = argv[i];
        else if (word == "--precision")
            options.device.precision = argv[i];
        else if (word == "--threads") {
            if (!parse_int(argv[i], options.device.threads)) return false;
        } else if (word == "--budget") {
            if (!parse_int(argv[i], options.budget) || options.budget > kMaxNodes) return false;
        } else {
            return false;
        }
    }
    return !options.file.empty();
}

struct Run {
    std::vector<int32_t> tokens;
    std::vector<float> logits;
    SessionStats stats;
};

Run decode(const std::shared_ptr<Executor>& executor, const GoldenRun& golden, int budget) {
    Session session(executor);
    session.append(golden.prompt);
    GenerateParams params;
    params.max_tokens = static_cast<int>(golden.tokens.size());
    params.keep_logits = true;
    params.budget = budget;
    if (budget > 0) params.drafter = golden.drafter;
    session.begin(params);
    Run run;
    for (;;) {
        const StepResult step = session.step();
        run.tokens.insert(run.tokens.end(), step.tokens.begin(), step.tokens.end());
        if (step.finish == Finish::error) fail(ErrorCode::not_finite, "%s", step.error.c_str());
        if (step.finish != Finish::none) break;
    }
    run.logits = session.logits();
    run.stats = session.stats();
    return run;
}

// One line in the manner of harness.matrix. `same_bits_as` is the plain run for tree legs.
bool report(const std::string& bundle, const std::string& backend, const char* decoder,
            const GoldenRun& golden, const Run& run, const Run* same_bits_as) {
    size_t equal = 0;
    while (equal < std::min(run.tokens.size(), golden.tokens.size()) &&
           run.tokens[equal] == golden.tokens[equal])
        ++equal;
    float difference = 0.0f, largest = 1.0f;
    for (size_t i = 0; i < std::min(run.logits.size(), golden.logits.size()); ++i) {
        difference = std::max(difference, std::fabs(run.logits[i] - golden.logits[i]));
        largest = std::max(largest, std::fabs(golden.logits[i]));
    }
    bool pass = equal == golden.tokens.size() && run.tokens.size() == equal && difference <= 1e-5f * largest;
    const char* bits = "";
    if (same_bits_as != nullptr) {
        const bool same = run.logits.size() == same_bits_as->logits.size() &&
                          std::memcmp(run.logits.data(), same_bits_as->logits.data(),
                                      run.logits.size() * sizeof(float)) == 0;
        pass = pass && same;
        bits = same ? "  bits=plain" : "  bits=DIFFER";
    }
    std::printf("%s  %s  %s  %s  tokens=%zu/%zu %s  max_abs_logit_diff=%.1e  target_forwards=%d%s\n",
                pass ? "PASS" : "FAIL", bundle.c_str(), backend.c_str(), decoder, equal, golden.tokens.size(),
                equal == golden.tokens.size() ? "exact" : "DIFFER", static_cast<double>(difference),
                run.stats.target_forwards, bits);
    return pass;
}

int run(const Options& options) {
    const KdtrFile file = KdtrFile::open(options.file);
    const std::shared_ptr<const Engine> engine = load_engine(file, options.device);
    const GoldenRun golden = load_golden_run(file, engine->config().vocab_size);
    ExecutorOptions limits;
    limits.context = static_cast<int>(golden.prompt.size() + golden.tokens.size() + 1);
    const auto executor = std::make_shared<Executor>(engine, limits);

    std::string bundle = options.file.substr(options.file.find_last_of('/') + 1);
    if (bundle.ends_with(".kdtr")) bundle.resize(bundle.size() - 5);
    const std::string backend = engine->backend().name();
    const Run plain = decode(executor, golden, 0);
    const Run tree = decode(executor, golden, options.budget);
    const bool plain_ok = report(bundle, backend, "plain", golden, plain, nullptr);
    const bool tree_ok = report(bundle, backend, "ddtree", golden, tree, &plain);
    return plain_ok && tree_ok ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    if (!parse(argc, argv, options)) {
        std::fputs(kUsage, stderr);
        return 2;
    }
    try {
        return run(options);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "kdtree-verify: %s\n", error.what());
        return 1;
    }
}
