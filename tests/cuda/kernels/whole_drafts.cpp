// Whole drafts of the block-diffusion model: on the GPU against the CPU backend, and against themselves in
// other batches.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "draft/dflash.h"
#include "testing.h"

namespace kdt::testing {

namespace {

constexpr int kPages = 6;

DFlashConfig draft_config(int kind) {
    DFlashConfig c{};
    c.hidden_size = kind == 2 ? 52 : 64;
    c.vocab_size = kind == 2 ? 301 : 256;
    c.num_hidden_layers = kind == 0 ? 2 : 3;
    c.num_attention_heads = kind == 1 ? 6 : 8;
    c.num_key_value_heads = 2;
    c.head_dim = kind == 1 ? 18 : kind == 2 ? 24 : 16;
    c.intermediate_size = 80;
    c.rms_norm_eps = 1e-5;
    c.rotary.dim = c.head_dim;
    c.rotary.theta = 10000.0;
    c.rotary.amplitude = 1.0;
    c.block_rows = options().small ? 4 : kind == 0 ? 8 : kind == 1 ? 6 : 16;
    c.mask_token_id = 17;
    c.target_layers = {3, 0};
    c.window = kind == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 90, 7};
    c.causal = kind == 0 ? std::vector<int>{0, 0} : std::vector<int>{0, 0, 1};
    return c;
}

// A random draft model on one backend, with an executor's side of its memory.
struct Draft {
    Backend& b;
    DFlashModel model;
    Device<int32_t> page_table;
    std::unique_ptr<DFlashRunner> runner;

    Draft(Backend& backend, const DFlashConfig& c, WeightKind kind)
        : b(backend), page_table(b, std::vector<int32_t>{9, 9, 9, 9, 9, 9, 4, 1, 7, 0, 3, 5}) {
        Random random(77);
        model.config = c;
        const auto matrix = [&](int out, int in) {
            return b.upload_matrix(random_matrix(random, kind, DType::f32, out, in).host(), "w");
        };
        const auto norm = [&](int n) {
            std::vector<float> w = random_values(random, static_cast<size_t>(n));
            for (float& v : w) v = 1.0f + 0.3f * v;
            return b.upload_vector(w, "norm");
        };
        model.weights.fc = matrix(c.hidden_size, c.tap_width());
        model.weights.hidden_norm = norm(c.hidden_size);
        model.weights.norm = norm(c.hidden_size);
        for (int i = 0; i < c.num_hidden_layers; ++i) {
            DFlashLayer w;
            w.input_norm = norm(c.hidden_size);
            w.q = matrix(c.query_width(), c.hidden_size);
            w.k = matrix(c.key_width(), c.hidden_size);
            w.v = matrix(c.key_width(), c.hidden_size);
            w.o = matrix(c.hidden_size, c.query_width());
            w.q_norm = norm(c.head_dim);
            w.k_norm = norm(c.head_dim);
            w.post_attention_norm = norm(c.hidden_size);
            w.gate = matrix(c.intermediate_size, c.hidden_size);
            w.up = matrix(c.intermediate_size, c.hidden_size);
            w.down = matrix(c.hidden_size, c.intermediate_size);
            model.weights.layers.push_back(w);
        }
        model.embed = matrix(c.vocab_size, c.hidden_size);
        model.head = matrix(c.vocab_size, c.hidden_size);
        DFlashPlace place;
        place.page_table = page_table.data();
        place.page_count = 10;
        place.pages_per_sequence = kPages;
        place.sequences = 2;
        place.context = kPages * kPageSize;
        place.rows = 200;
        runner = std::make_unique<DFlashRunner>(b, model, place);
    }

    // Positions first .. first + count - 1 of sequence 1, whose taps are rows of `taps`.
    void feed(const std::vector<float>& taps, int first, int count, bool through_kept) {
        const size_t width = static_cast<size_t>(model.config.tap_width());
        b.upload(runner->taps(), taps.data() + static_cast<size_t>(first) * width,
                 static_cast<size_t>(count) * width * sizeof(float));
        if (!through_kept) return runner->feed_taps(1, first, count);
        std::vector<int32_t> path(kMaxTreeRows);
        std::iota(path.begin(), path.end(), 0);
        const Device<int32_t> dl = scalar(b, static_cast<size_t>(count)), dp(b, path),
                              df = scalar(b, DFlashRunner::kKeptRows);
        b.keep_taps({dl.data(), dp.data(), df.data(), runner->kept_capacity(), static_cast<int>(width),
                     runner->taps(), runner->kept()});
        runner->feed_kept(1, first, count);
        b.synchronize();
    }
};

struct Drafted {
    std::vector<float> features, logits, entries;
    Proposal proposal;
};

// Drafts behind `length` positions that were fed in batches of these sizes, repeated.
Drafted draft_behind(Draft& d, const std::vector<float>& taps, int length, const std::vector<int>& batches,
                     bool through_kept) {
    Drafted r;
    const size_t hidden = static_cast<size_t>(d.model.config.hidden_size);
    size_t i = 0;
    for (int at = 0; at < length;) {
        const int n = std::min(batches[i++ % batches.size()], length - at);
        d.feed(taps, at, n, through_kept);
        const std::vector<float> f = d.runner->features(n);
        r.features.insert(r.features.end(), f.begin(),
                          f.begin() + static_cast<ptrdiff_t>(static_cast<size_t>(n) * hidden));
        at += n;
    }
    d.runner->draft(1, length, 42, r.proposal);
    r.logits = d.runner->logits();
    const std::vector<int32_t> pages = {4, 1, 7, 0, 3, 5};
    for (int layer = 0; layer < d.model.config.num_hidden_layers; ++layer) {
        const std::vector<float> e = d.runner->cache(layer, pages, length);
        r.entries.insert(r.entries.end(), e.begin(), e.end());
    }
    return r;
}

void expect_close(const std::vector<float>& got, const std::vector<float>& wanted, double tolerance,
                  const std::string& what) {
    double largest = 1.0;
    for (const float v : wanted) largest = std::max(largest, std::fabs(static_cast<double>(v)));
    std::vector<double> values(wanted.begin(), wanted.end());
    expect_near(got, values, std::vector<double>(wanted.size(), tolerance * largest), what);
}

}  // namespace

// Anything that the CUDA ops, or the way in which a draft strings them together, compute otherwise than the
// CPU's; a feature, a key or a proposal that depends on how positions were batched, or on the drafts before.
KDT_CASE(drafts_equal_the_cpu_backend_and_themselves) {
    Random random(47);
    const auto cpu = make_cpu_backend({1, ""});
    Backend::WorkspaceSizes sizes{};
    sizes.rows = kMaxBlockRows;
    sizes.hidden = 64;
    sizes.heads = 8;
    sizes.latent = sizes.rope = sizes.top_k = sizes.experts = sizes.intermediate = 1;
    sizes.vocab = 512;
    sizes.positions = kPages * kPageSize;
    cpu->reserve_workspace(sizes);
    for (int kind = 0; kind < 3; ++kind) {
        const DFlashConfig c = draft_config(kind);
        const WeightKind weights = kind == 2 ? WeightKind::bf16 : WeightKind::f32;
        const std::vector<float> taps =
            random_values(random, static_cast<size_t>(kPages * kPageSize * c.tap_width()));
        Draft reference(*cpu, c, weights);
        for (const std::string precision : {"f32", "bf16"}) {
            if (options().small && kind != (precision == "f32" ? 1 : 2)) continue;
            Draft d(backend(precision), c, weights);
            const double tolerance = precision == "f32" ? 1e-5 : 4e-2;
            const std::vector<int> lengths =
                options().small ? std::vector<int>{70} : std::vector<int>{1, 64, 70, 300};
            for (const int length : lengths) {
                const std::string what =
                    format("%s, config %d, %d positions", precision.c_str(), kind, length);
                const Drafted wanted = draft_behind(reference, taps, length, {200}, false);
                const Drafted got = draft_behind(d, taps, length, {200}, false);
                expect_close(got.features, wanted.features, tolerance, what + ": features");
                expect_close(got.entries, wanted.entries, tolerance, what + ": keys and values");
                expect_close(got.logits, wanted.logits, tolerance, what + ": logits");
                expect_close(got.proposal.table_logp, wanted.proposal.table_logp, tolerance,
                             what + ": table");
                if (got.proposal.depth != c.drafts() ||
                    got.proposal.table_token.size() != wanted.proposal.table_token.size())
                    failed("%s: a table of %d depths", what.c_str(), got.proposal.depth);

                const Drafted again = draft_behind(d, taps, length, {1, 5, 33}, true);
                expect_same(again.features, got.features, what + ": features in other batches");
                expect_same(again.entries, got.entries, what + ": entries in other batches");
                expect_same(again.logits, got.logits, what + ": logits in other batches");
                expect_same(again.proposal.table_token, got.proposal.table_token,
                            what + ": tokens in other batches");
                expect_same(again.proposal.table_logp, got.proposal.table_logp,
                            what + ": table in other batches");
            }
        }
    }
}

}  // namespace kdt::testing
