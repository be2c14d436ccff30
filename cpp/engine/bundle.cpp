#include "engine/bundle.h"

#include <array>
#include <string_view>

#include "core/error.h"

namespace kdt {

namespace {

constexpr std::array<std::string_view, 7> kGoldenPrefixes = {"prompt.", "plain.",  "draft.", "tree.",
                                                             "accept.", "ddtree.", "golden."};

bool is_golden(std::string_view name) {
    for (const std::string_view prefix : kGoldenPrefixes)
        if (name.starts_with(prefix)) return true;
    return false;
}

double scalar(const KdtrFile& file, std::string_view name, const TensorView& t) {
    if (t.elements() == 1) {
        if (t.dtype == DType::f64) return *static_cast<const double*>(t.data);
        if (t.dtype == DType::i64) return static_cast<double>(*static_cast<const int64_t*>(t.data));
    }
    fail(ErrorCode::bad_model, "%s: %.*s is %s %s; expected an f64 or i64 scalar", file.label().c_str(),
         static_cast<int>(name.size()), name.data(), dtype_name(t.dtype), shape_text(t.shape).c_str());
}

const TensorView& want(const KdtrFile& file, std::string_view name, DType dtype, size_t rank) {
    const TensorView* t = file.find(name);
    if (t == nullptr)
        fail(ErrorCode::bad_model, "%s has no tensor %.*s: it is not a golden model bundle",
             file.label().c_str(), static_cast<int>(name.size()), name.data());
    if (t->dtype != dtype || t->shape.size() != rank)
        fail(ErrorCode::bad_model, "%s: %.*s is %s %s; expected %s of rank %zu", file.label().c_str(),
             static_cast<int>(name.size()), name.data(), dtype_name(t->dtype), shape_text(t->shape).c_str(),
             dtype_name(dtype), rank);
    return *t;
}

template <class T>
std::span<const T> values(const TensorView& t) {
    return {static_cast<const T*>(t.data), static_cast<size_t>(t.elements())};
}

}  // namespace

std::shared_ptr<const Engine> load_engine(const KdtrFile& file, const DeviceOptions& options) {
    file.verify_checksums();
    std::map<std::string, double> config;
    for (const std::string_view name : file.names())
        if (name.starts_with("config."))
            config[std::string(name.substr(7))] = scalar(file, name, *file.find(name));
    if (config.empty())
        fail(ErrorCode::bad_model, "%s holds no config: it is not a model", file.label().c_str());

    EngineBuilder builder(config, options);
    for (const std::string_view name : file.names()) {
        if (name.starts_with("config.") || is_golden(name)) continue;
        const TensorView& tensor = *file.find(name);
        if (name.ends_with(".qw")) {
            const std::string module(name.substr(0, name.size() - 3));
            const TensorView* scales = file.find(module + ".sc");
            if (scales == nullptr)
                fail(ErrorCode::bad_model, "%s: tensor %s.qw has no %s.sc", file.label().c_str(),
                     module.c_str(), module.c_str());
            builder.loader().add_w4a16(module, tensor, *scales);
        } else if (name.ends_with(".sc")) {
            const std::string module(name.substr(0, name.size() - 3));
            if (file.find(module + ".qw") == nullptr)
                fail(ErrorCode::bad_model, "%s: tensor %s.sc has no %s.qw", file.label().c_str(),
                     module.c_str(), module.c_str());
        } else {
            builder.loader().add(std::string(name), tensor);
        }
    }
    return builder.finish();
}

GoldenRun load_golden_run(const KdtrFile& file, int vocab) {
    const TensorView& prompt = want(file, "prompt.tokens", DType::i32, 1);
    const TensorView& tokens = want(file, "plain.tokens", DType::i32, 1);
    const TensorView& logits = want(file, "plain.logits", DType::f32, 2);
    const TensorView& position = want(file, "draft.position", DType::i32, 1);
    const TensorView& draft_tokens = want(file, "draft.tokens", DType::i32, 3);
    const TensorView& draft_logp = want(file, "draft.logp", DType::f32, 3);
    if (prompt.shape[0] < 1 || tokens.shape[0] < 1)
        fail(ErrorCode::bad_model,
             "%s: prompt.tokens has %lld tokens, plain.tokens %lld; expected at least one of each",
             file.label().c_str(), static_cast<long long>(prompt.shape[0]),
             static_cast<long long>(tokens.shape[0]));
    if (logits.shape[0] != tokens.shape[0] || logits.shape[1] != vocab)
        fail(ErrorCode::bad_model, "%s: plain.logits is %s; expected [%lld, %d]", file.label().c_str(),
             shape_text(logits.shape).c_str(), static_cast<long long>(tokens.shape[0]), vocab);
    if (draft_tokens.shape != draft_logp.shape || draft_tokens.shape[0] != position.shape[0])
        fail(ErrorCode::bad_model,
             "%s: draft.tokens is %s, draft.logp %s, draft.position %s; expected [P, L, K] twice and [P]",
             file.label().c_str(), shape_text(draft_tokens.shape).c_str(),
             shape_text(draft_logp.shape).c_str(), shape_text(position.shape).c_str());
    constexpr int64_t kMax = 1 << 20;
    if (draft_tokens.shape[1] > kMax || draft_tokens.shape[2] > kMax)
        fail(ErrorCode::bad_model, "%s: draft.tokens is %s, larger than any draft table",
             file.label().c_str(), shape_text(draft_tokens.shape).c_str());
    GoldenRun run;
    const auto copy = [](auto& to, const auto& from) { to.assign(from.begin(), from.end()); };
    copy(run.prompt, values<int32_t>(prompt));
    copy(run.tokens, values<int32_t>(tokens));
    copy(run.logits, values<float>(logits));
    run.drafter = std::make_shared<ReplayDrafter>(
        values<int32_t>(position), values<int32_t>(draft_tokens), values<float>(draft_logp),
        static_cast<int>(draft_tokens.shape[1]), static_cast<int>(draft_tokens.shape[2]));
    return run;
}

}  // namespace kdt
