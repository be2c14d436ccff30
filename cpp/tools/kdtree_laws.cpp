// kdtree-laws: law 2 on a random model of a true shape, without Python. Decodes plainly, then with trees of
// several budgets over drafts planted from the plain run, and compares tokens, logits and latents bit for
// bit.
//
// Exit codes: 0 everything equal, 1 a difference or an error, 2 wrong usage or nothing accepted.

#include <algorithm>
#include <climits>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>

#include "core/arguments.h"
#include "core/error.h"
#include "draft/planted.h"
#include "engine/session.h"
#include "tools/random_model.h"

namespace {

using namespace kdt;

constexpr const char* kUsage =
    "usage: kdtree-laws [--shape tiny|moonlight|k2] [--layers N] [--device cpu|cuda[:N]] [--threads N] "
    "[--precision bf16|f32]\n"
    "                   [--prompt N] [--tokens N] [--budgets 1,8,31,64] [--seed N] [--sampled] [--latents] "
    "[--sessions N] [--json FILE]\n"
    "Decodes plainly and with trees; with --sessions also so many sessions at once, a thread each. All must "
    "be "
    "equal, bit for bit.\n";

constexpr int kMostTokens = 1 << 20;

struct Options {
    std::string shape = "tiny";
    DeviceOptions device;
    int layers = 0, prompt = 100, tokens = 200, seed = 1, sessions = 0;
    std::vector<int> budgets = {1, 4, 8, 16, 31, 64};
    bool sampled = false, latents = false;
    std::string json;  // file for the record; none by default
};

// False where only the usage is asked for.
bool parse(Arguments words, Options& o) {
    while (words.next()) {
        if (words.is("--help") || words.is("-h")) return false;
        if (words.is("--sampled"))
            o.sampled = true;
        else if (words.is("--latents"))
            o.latents = true;
        else if (words.is("--shape"))
            o.shape = words.choice({"tiny", "moonlight", "k2"});
        else if (words.is("--device"))
            o.device.device = words.text();
        else if (words.is("--precision"))
            o.device.precision = words.choice({"f32", "bf16"});
        else if (words.is("--json"))
            o.json = words.text();
        else if (words.is("--layers"))
            o.layers = words.integer(0, 1024);
        else if (words.is("--threads"))
            o.device.threads = words.integer(0, 1024);
        else if (words.is("--prompt"))
            o.prompt = words.integer(1, kMostTokens);
        else if (words.is("--tokens"))
            o.tokens = words.integer(1, kMostTokens);
        else if (words.is("--seed"))
            o.seed = words.integer(0, INT_MAX);
        else if (words.is("--budgets"))
            o.budgets = words.integers(0, kMaxNodes);
        else if (words.is("--sessions"))
            o.sessions = words.integer(0, 64);
        else if (words.is_option())
            words.unknown();
        else
            throw UsageError(format("%s is no option; there is nothing else to give", words.word().c_str()));
    }
    return true;
}

struct Run {
    std::vector<int32_t> timeline;
    std::vector<float> logits;
    std::vector<std::vector<float>> latents;
    SessionStats stats;
    double seconds() const {
        const SessionStats::Seconds& s = stats.seconds;
        return s.draft + s.build + s.verify + s.accept + s.commit;
    }
};

Run decode(const std::shared_ptr<Executor>& executor, const Options& o, const std::vector<int32_t>& prompt,
           int budget, std::shared_ptr<Drafter> drafter, bool keep_logits = true) {
    Session session(executor);
    session.append(prompt);
    GenerateParams params;
    params.max_tokens = o.tokens;
    params.keep_logits = keep_logits;
    params.budget = budget;
    params.drafter = std::move(drafter);
    if (o.sampled) params.sample = {0.8f, 0, 1.0f, 0.0f, static_cast<uint64_t>(o.seed), 0};
    session.begin(params);
    for (;;) {
        const StepResult step = session.step();
        if (step.finish == Finish::error) fail(ErrorCode::not_finite, "%s", step.error.c_str());
        if (step.finish != Finish::none) break;
    }
    Run run;
    run.timeline = session.tokens();
    run.logits = session.logits();
    run.stats = session.stats();
    if (o.latents)
        for (int layer = 0; layer < executor->engine().config().num_hidden_layers; ++layer)
            run.latents.push_back(session.cache(layer));
    return run;
}

template <class T>
bool same_bytes(const std::vector<T>& a, const std::vector<T>& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Where two runs' latents part: the lowest layer that differs, its first position, how many of them, and how
// many layers differ. Empty: they are the same.
std::string parting(const Run& a, const Run& b) {
    std::string where;
    int layers = 0;
    for (size_t layer = 0; layer < a.latents.size(); ++layer) {
        const std::vector<float>&x = a.latents[layer], &y = b.latents[layer];
        if (same_bytes(x, y)) continue;
        if (layers++ > 0) continue;
        const size_t positions = a.timeline.size() - 1, width = x.size() / std::max<size_t>(positions, 1);
        size_t first = positions, differ = 0;
        for (size_t p = 0; p < std::min(x.size(), y.size()) / std::max<size_t>(width, 1); ++p)
            if (std::memcmp(x.data() + p * width, y.data() + p * width, width * sizeof(float)) != 0) {
                first = std::min(first, p);
                ++differ;
            }
        where = format("layer %zu, from position %zu, %zu positions", layer, first, differ);
    }
    return layers == 0 ? "" : format("latents part: %s; %d layers differ", where.c_str(), layers);
}

// So many threads, each with a session on one engine, plain and with the trees of `budget`: how many of them
// do not have the plain run's bits.
int at_once(const std::shared_ptr<const Engine>& engine, const Options& o, const std::vector<int32_t>& prompt,
            const Run& plain, int budget) {
    ExecutorOptions limits;
    limits.context = o.prompt + o.tokens + 1;
    limits.sessions = (o.sessions + 1) / 2;
    // Two executors: sessions of one share its memory, all of them the engine's workspace.
    const std::shared_ptr<Executor> executors[2] = {std::make_shared<Executor>(engine, limits),
                                                    std::make_shared<Executor>(engine, limits)};
    std::vector<Run> runs(static_cast<size_t>(o.sessions));
    std::vector<std::string> errors(runs.size());
    std::vector<std::thread> threads;
    for (size_t i = 0; i < runs.size(); ++i)
        threads.emplace_back([&, i] {
            try {
                PlantedOptions planted;
                planted.seed = static_cast<uint64_t>(o.seed) + i;
                std::shared_ptr<Drafter> drafter;
                if (i % 3 != 0)
                    drafter = std::make_shared<PlantedDrafter>(plain.timeline, engine->config().vocab_size,
                                                               planted);
                const int nodes = i % 3 == 1 ? budget : -1;
                runs[i] = decode(executors[i % 2], o, prompt, drafter ? nodes : 0, drafter);
            } catch (const std::exception& error) {
                errors[i] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    int differ = 0;
    for (size_t i = 0; i < runs.size(); ++i) {
        if (!errors[i].empty()) fail(ErrorCode::internal, "session %zu: %s", i, errors[i].c_str());
        bool same = same_bytes(runs[i].timeline, plain.timeline) && same_bytes(runs[i].logits, plain.logits);
        for (size_t layer = 0; layer < plain.latents.size(); ++layer)
            same = same && same_bytes(runs[i].latents[layer], plain.latents[layer]);
        differ += !same;
    }
    std::printf("%d sessions at once, a thread each: %d differ from the plain run\n", o.sessions, differ);
    return differ;
}

int run(const Options& o) {
    const auto engine =
        random_engine(shape_fields(o.shape, o.layers), o.device, static_cast<uint64_t>(o.seed));
    const int vocab = engine->config().vocab_size;
    ExecutorOptions limits;
    limits.context = o.prompt + o.tokens + 1;
    const auto executor = std::make_shared<Executor>(engine, limits);
    SplitMix random(static_cast<uint64_t>(o.seed) + 99);
    std::vector<int32_t> prompt(o.prompt);
    for (int32_t& t : prompt) t = static_cast<int32_t>(random.next() % vocab);
    std::printf("%s, %d layers, %s, %.2f GiB of weights\n", o.shape.c_str(),
                engine->config().num_hidden_layers, engine->backend().description().c_str(),
                static_cast<double>(engine->backend().weight_bytes()) / (1 << 30));

    const Run plain = decode(executor, o, prompt, 0, nullptr);
    std::printf("plain      %d tokens, prompt %.3f s, %.2f ms per token\n", o.tokens,
                plain.stats.seconds.prefill, 1e3 * plain.seconds() / std::max(1, plain.stats.rounds));
    // Copying logits to the host is no part of decoding: the speed is that of a run that keeps none.
    const Run timed = decode(executor, o, prompt, 0, nullptr, false);
    const double plain_ms = 1e3 * timed.seconds() / std::max(1, timed.stats.rounds);
    std::printf("           %.3f ms per token where no logits are kept\n", plain_ms);
    std::string legs;
    int accepted = 0, failures = 0;
    if (const std::string where = parting(plain, timed); !where.empty()) {
        std::printf("           the second plain run's %s\n", where.c_str());
        ++failures;
    }
    for (const int budget : o.budgets) {
        PlantedOptions planted;
        planted.seed = static_cast<uint64_t>(o.seed) + budget;
        const Run tree = decode(executor, o, prompt, budget,
                                std::make_shared<PlantedDrafter>(plain.timeline, vocab, planted));
        const bool tokens = same_bytes(tree.timeline, plain.timeline),
                   logits = same_bytes(tree.logits, plain.logits);
        bool latents = true;
        for (size_t layer = 0; layer < plain.latents.size(); ++layer)
            latents = latents && same_bytes(tree.latents[layer], plain.latents[layer]);
        const int longest =
            tree.stats.accepted_lengths.empty()
                ? 0
                : *std::max_element(tree.stats.accepted_lengths.begin(), tree.stats.accepted_lengths.end());
        std::printf(
            "budget %2d  tokens %s, logits %s%s; %d rounds, %d accepted, longest %d, %d through later "
            "children, %.2f ms a round\n",
            budget, tokens ? "equal" : "DIFFER", logits ? "equal" : "DIFFER",
            !o.latents ? ""
            : latents  ? ", latents equal"
                       : ", latents DIFFER",
            tree.stats.rounds, tree.stats.accepted, longest, tree.stats.branching_rounds,
            1e3 * tree.seconds() / std::max(1, tree.stats.rounds));
        const auto word = [](bool b) { return b ? "true" : "false"; };
        legs += format(
            "%s\n    {\"budget\": %d, \"tokens_equal\": %s, \"logits_equal\": %s, \"latents_equal\": %s, "
            "\"rounds\": %d, \"accepted\": %d, \"longest\": %d, \"branching_rounds\": %d, "
            "\"ms_per_round_with_logits_kept\": %.4f}",
            legs.empty() ? "" : ",", budget, word(tokens), word(logits), o.latents ? word(latents) : "null",
            tree.stats.rounds, tree.stats.accepted, longest, tree.stats.branching_rounds,
            1e3 * tree.seconds() / std::max(1, tree.stats.rounds));
        if (const std::string where = parting(plain, tree); !where.empty())
            std::printf("           %s\n", where.c_str());
        failures += !(tokens && logits && latents);
        accepted += tree.stats.accepted;
    }
    const int differ = o.sessions > 0 ? at_once(engine, o, prompt, plain,
                                                *std::max_element(o.budgets.begin(), o.budgets.end()))
                                      : 0;
    std::printf("%zu tokens compared, %zu logit values each time; %d budgets differ\n",
                o.budgets.size() * static_cast<size_t>(o.tokens), plain.logits.size(), failures);
    if (!o.json.empty()) {
        std::FILE* file = std::fopen(o.json.c_str(), "w");
        if (file == nullptr) fail(ErrorCode::io, "%s could not be written", o.json.c_str());
        std::fprintf(
            file,
            "{\n  \"shape\": \"%s\", \"layers\": %d, \"device\": \"%s\", \"weight_bytes\": %zu,\n"
            "  \"prompt\": %d, \"tokens\": %d, \"sampled\": %s, \"seed\": %d,\n"
            "  \"sessions_at_once\": %d, \"sessions_that_differ\": %d,\n"
            "  \"prompt_seconds\": %.4f, \"plain_ms_per_token\": %.4f,\n  \"budgets\": [%s\n  ]\n}\n",
            o.shape.c_str(), engine->config().num_hidden_layers, engine->backend().description().c_str(),
            engine->backend().weight_bytes(), o.prompt, o.tokens, o.sampled ? "true" : "false", o.seed,
            o.sessions, differ, timed.stats.seconds.prefill, plain_ms, legs.c_str());
        if (std::fclose(file) != 0) fail(ErrorCode::io, "%s could not be written", o.json.c_str());
    }
    if (failures + differ > 0) return 1;
    if (accepted == 0) {
        std::printf("nothing was tested: no draft node was accepted\n");
        return 2;
    }
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    return run_tool(
        "kdtree-laws", kUsage, [&] { return parse({argc, argv}, options); }, [&] { return run(options); });
}
