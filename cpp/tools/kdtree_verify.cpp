// kdtree-verify FILE: runs a golden bundle without Python, for sanitizers and bare boxes. Decodes plainly and
// with trees, and judges both as harness.matrix does (tools/verdict.h): in f32 tokens and logits are the
// bundle's, in bf16 logits are near them along the bundle's text; tree tokens and logits are the plain ones,
// bit for bit, in either precision.
//
// Exit codes: 0 all legs passed, 1 a leg failed or an error, 2 wrong usage.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>

#include "core/arguments.h"
#include "core/error.h"
#include "engine/bundle.h"
#include "engine/session.h"
#include "tools/verdict.h"

namespace {

using namespace kdt;

constexpr int kMostThreads = 1024;

constexpr const char* kUsage =
    "usage: kdtree-verify FILE [--device cpu|cuda[:N]] [--threads N] [--isa NAME] [--precision f32|bf16] "
    "[--budget N]\n"
    "Decodes a golden bundle plainly and with trees of N nodes (64). Tree tokens and logits must be the "
    "plain ones, bit for bit.\n"
    "In f32 both must be the bundle's; in bf16 (a GPU's default), which cannot have a float32 oracle's "
    "tokens, logits must be near\n"
    "its own along the bundle's text: at the median position within 3e-2 * max(1, largest |logit|).\n";

struct Options {
    std::string file;
    DeviceOptions device;
    int budget = kMaxNodes;
};

// False where only the usage is asked for.
bool parse(Arguments words, Options& options) {
    while (words.next()) {
        if (words.is("--help") || words.is("-h")) return false;
        if (words.is("--device"))
            options.device.device = words.text();
        else if (words.is("--isa"))
            options.device.isa = words.text();
        else if (words.is("--precision"))
            options.device.precision = words.choice({"f32", "bf16"});
        else if (words.is("--threads"))
            options.device.threads = words.integer(0, kMostThreads);
        else if (words.is("--budget"))
            options.budget = words.integer(0, kMaxNodes);
        else if (words.is_option())
            words.unknown();
        else if (options.file.empty())
            options.file = words.word();
        else
            throw UsageError(format("%s and %s are two bundles; expected one FILE", options.file.c_str(),
                                    words.word().c_str()));
    }
    if (options.file.empty()) throw UsageError("FILE is missing: the golden bundle to decode");
    return true;
}

struct Run {
    Decoding decoding;
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
        run.decoding.tokens.insert(run.decoding.tokens.end(), step.tokens.begin(), step.tokens.end());
        if (step.finish == Finish::error) fail(ErrorCode::not_finite, "%s", step.error.c_str());
        if (step.finish != Finish::none) break;
    }
    run.decoding.logits = session.logits();
    run.stats = session.stats();
    return run;
}

// Logits along the bundle's own text: those from which each of its tokens was chosen.
std::vector<float> logits_along(const std::shared_ptr<Executor>& executor, const GoldenRun& golden,
                                int vocab) {
    std::vector<int32_t> text(golden.prompt);
    text.insert(text.end(), golden.tokens.begin(), golden.tokens.end() - 1);
    Session session(executor);
    const std::vector<float> all = session.score(text);
    const size_t behind_prompt = (golden.prompt.size() - 1) * static_cast<size_t>(vocab);
    return {all.begin() + static_cast<std::ptrdiff_t>(behind_prompt), all.end()};
}

// One line in the manner of harness.matrix, and a sentence for what was found.
void report(const std::string& bundle, const std::string& backend, const char* decoder,
            const GoldenRun& golden, const Run& run, const Verdict& v, bool rounded) {
    std::printf("%s  %s  %s  %s  tokens=%zu/%zu %s  max_abs_logit_diff=%.1e", v.pass() ? "PASS" : "FAIL",
                bundle.c_str(), backend.c_str(), decoder, v.tokens_equal, golden.tokens.size(),
                v.exact ? "exact" : "DIFFER", v.largest);
    if (rounded) std::printf("  median=%.1e", v.median);
    std::printf("  target_forwards=%d%s\n", run.stats.target_forwards,
                !v.compared_bits ? ""
                : v.same_bits    ? "  bits=plain"
                                 : "  bits=DIFFER");
    for (const std::string& fault : v.faults) std::printf("      %s.\n", fault.c_str());
    if (!v.pass()) return;
    if (v.compared_bits)
        std::printf("      Law 2 holds: all %zu tokens and %zu logits are the plain run's, bit for bit.\n",
                    run.decoding.tokens.size(), run.decoding.logits.size());
    else if (rounded)
        std::printf(
            "      Along the bundle's text the median position differs from the float32 oracle by %.1e, "
            "of %.1e allowed; bf16 is not asked for its tokens.\n",
            v.median, v.allowed);
    else
        std::printf("      Tokens are the oracle's, logits differ by %.1e, of %.1e allowed.\n", v.largest,
                    v.allowed);
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
    std::string backend = engine->backend().name();
    if (backend == "cuda") backend += engine->backend().cache_dtype() == DType::bf16 ? "/bf16" : "/f32";
    const int vocab = engine->config().vocab_size;
    const DType precision = engine->backend().cache_dtype();  // of the cache and of matrix operands
    const bool rounded = precision == DType::bf16;
    const Decoding oracle{golden.tokens, golden.logits};
    const std::vector<float> along = rounded ? logits_along(executor, golden, vocab) : std::vector<float>{};
    const Run plain = decode(executor, golden, 0);
    const Run tree = decode(executor, golden, options.budget);
    const Verdict plainly = judge(oracle, vocab, precision, plain.decoding, along, nullptr);
    const Verdict with_trees = judge(oracle, vocab, precision, tree.decoding, along, &plain.decoding);
    report(bundle, backend, "plain", golden, plain, plainly, rounded);
    report(bundle, backend, "ddtree", golden, tree, with_trees, rounded);
    return plainly.pass() && with_trees.pass() ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    return run_tool(
        "kdtree-verify", kUsage, [&] { return parse({argc, argv}, options); }, [&] { return run(options); });
}
