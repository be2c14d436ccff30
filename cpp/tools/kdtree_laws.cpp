// kdtree-laws: law 2 on a random model of a true shape, without Python. Decodes plainly, then with trees of
// several budgets over drafts planted from the plain run, and compares tokens, logits and latents bit for
// bit.
//
// Exit codes: 0 everything equal, 1 a difference or an error, 2 wrong usage or nothing accepted.

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <string>

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
    "[--json FILE]\n";

struct Options {
    std::string shape = "tiny";
    DeviceOptions device;
    int layers = 0, prompt = 100, tokens = 200, seed = 1;
    std::vector<int> budgets = {1, 4, 8, 16, 31, 64};
    bool sampled = false, latents = false;
    std::string json;  // file for the record; none by default
};

bool parse_int(const std::string& text, int& value) {
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
    return result.ec == std::errc() && result.ptr == text.data() + text.size() && value >= 0;
}

bool parse_list(const std::string& text, std::vector<int>& values) {
    values.clear();
    for (size_t at = 0; at <= text.size();) {
        const size_t comma = std::min(text.find(',', at), text.size());
        int value;
        if (!parse_int(text.substr(at, comma - at), value) || value > kMaxNodes) return false;
        values.push_back(value);
        at = comma + 1;
    }
    return true;
}

bool parse(int argc, char** argv, Options& o) {
    for (int i = 1; i < argc; ++i) {
        const std::string word = argv[i];
        if (word == "--sampled" || word == "--latents") {
            (word == "--sampled" ? o.sampled : o.latents) = true;
            continue;
        }
        if (++i == argc) return false;
        const std::string value = argv[i];
        bool ok = true;
        if (word == "--shape")
            o.shape = value;
        else if (word == "--device")
            o.device.device = value;
        else if (word == "--precision")
            o.device.precision = value;
        else if (word == "--json")
            o.json = value;
        else if (word == "--layers")
            ok = parse_int(value, o.layers);
        else if (word == "--threads")
            ok = parse_int(value, o.device.threads);
        else if (word == "--prompt")
            ok = parse_int(value, o.prompt) && o.prompt > 0;
        else if (word == "--tokens")
            ok = parse_int(value, o.tokens) && o.tokens > 0;
        else if (word == "--seed")
            ok = parse_int(value, o.seed);
        else if (word == "--budgets")
            ok = parse_list(value, o.budgets);
        else
            ok = false;
        if (!ok) return false;
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
        failures += !(tokens && logits && latents);
        accepted += tree.stats.accepted;
    }
    std::printf("%zu tokens compared, %zu logit values each time; %d budgets differ\n",
                o.budgets.size() * static_cast<size_t>(o.tokens), plain.logits.size(), failures);
    if (!o.json.empty()) {
        std::FILE* file = std::fopen(o.json.c_str(), "w");
        if (file == nullptr) fail(ErrorCode::io, "%s could not be written", o.json.c_str());
        std::fprintf(
            file,
            "{\n  \"shape\": \"%s\", \"layers\": %d, \"device\": \"%s\", \"weight_bytes\": %zu,\n"
            "  \"prompt\": %d, \"tokens\": %d, \"sampled\": %s, \"seed\": %d,\n"
            "  \"prompt_seconds\": %.4f, \"plain_ms_per_token\": %.4f,\n  \"budgets\": [%s\n  ]\n}\n",
            o.shape.c_str(), engine->config().num_hidden_layers, engine->backend().description().c_str(),
            engine->backend().weight_bytes(), o.prompt, o.tokens, o.sampled ? "true" : "false", o.seed,
            timed.stats.seconds.prefill, plain_ms, legs.c_str());
        if (std::fclose(file) != 0) fail(ErrorCode::io, "%s could not be written", o.json.c_str());
    }
    if (failures > 0) return 1;
    if (accepted == 0) {
        std::printf("nothing was tested: no draft node was accepted\n");
        return 2;
    }
    return 0;
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
        std::fprintf(stderr, "kdtree-laws: %s\n", error.what());
        return 1;
    }
}
