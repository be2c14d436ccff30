// What must not depend on when an op runs: the same launch again, beside other work; no rows at all.
#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

// One of each op that has something to be decided by who comes first, over fixed inputs.
struct Scene {
    Backend& b;
    static constexpr int kHidden = 256, kExperts = 24, kTopK = 4;
    const int rows = options().small ? 2 : 17;
    const int vocab = options().small ? 200 : 3000;  // an emulated draw from many tokens takes long
    std::vector<float> weights;
    Weight int4, dense, gate;
    ExpertSet set;
    const float *norm, *bias;
    Device<float> x, h, y, logits, slot_weight, logp;
    Device<int32_t> live, position, token, expert, best;
    Device<SampleParams> params;

    static std::vector<float> values(Random& random, size_t n) {
        std::vector<float> v(n);
        for (float& x : v) x = random.symmetric();
        return v;
    }
    Scene(Backend& backend, Random& random)
        : b(backend),
          x(b, values(random, static_cast<size_t>(rows * kHidden))),
          h(b, static_cast<size_t>(rows * kHidden)),
          y(b, static_cast<size_t>(rows * kHidden)),
          logits(b, static_cast<size_t>(rows * vocab)),
          slot_weight(b, static_cast<size_t>(rows * kTopK)),
          logp(b, static_cast<size_t>(rows * 8)),
          live(scalar(b, static_cast<size_t>(rows))),
          position(b, std::vector<int32_t>(static_cast<size_t>(rows), 7)),
          token(b, static_cast<size_t>(rows)),
          expert(b, static_cast<size_t>(rows * kTopK)),
          best(b, static_cast<size_t>(rows * 8)),
          params(b, std::vector<SampleParams>{{options().small ? 0.0f : 0.8f, 40, 0.9f, 0.0f, 11, 0}}) {
        int4 = b.upload_matrix(random_matrix(random, WeightKind::w4a16, DType::bf16, kHidden, kHidden).host(),
                               "int4");
        dense = b.upload_matrix(random_matrix(random, WeightKind::bf16, DType::f32, vocab, kHidden).host(),
                                "head");
        gate = b.upload_matrix(random_matrix(random, WeightKind::bf16, DType::f32, kExperts, kHidden).host(),
                               "gate");
        norm = b.upload_vector(std::vector<float>(kHidden, 1.25f), "norm");
        bias = b.upload_vector(std::vector<float>(kExperts, 0.0f), "bias");
        std::vector<Weight> g, u, d;
        for (int e = 0; e < kExperts; ++e) {
            g.push_back(b.upload_matrix(
                random_matrix(random, WeightKind::w4a16, DType::bf16, 64, kHidden).host(), "g"));
            u.push_back(b.upload_matrix(
                random_matrix(random, WeightKind::w4a16, DType::bf16, 64, kHidden).host(), "u"));
            d.push_back(b.upload_matrix(
                random_matrix(random, WeightKind::w4a16, DType::bf16, kHidden, 64).host(), "d"));
        }
        set = b.make_experts(g, u, d, "experts");
    }
    void poison() {
        for (Device<float>* a : {&h, &logits, &slot_weight, &logp}) a->poison();
        for (Device<int32_t>* a : {&token, &expert, &best}) a->poison();
        y.set(std::vector<float>(static_cast<size_t>(rows * kHidden), 0.0f));
    }
    void issue() {
        const Rows all{rows, live.data()};
        b.rms_norm({all, x.data(), kHidden, norm, 1e-6f, kHidden, h.data()});
        b.linear({all, h.data(), int4, y.data(), true});
        b.route({all, h.data(), gate, bias, Scoring::sigmoid_noaux_tc, kTopK, 1, 1, true, 1.0f, expert.data(),
                 slot_weight.data()});
        b.experts({all, h.data(), set, expert.data(), slot_weight.data(), kTopK, nullptr, y.data()});
        b.linear({all, y.data(), dense, logits.data(), false});
        b.top_k({all, logits.data(), vocab, 8, best.data(), logp.data()});
        b.select({all, logits.data(), vocab, position.data(), params.data(), token.data()});
    }
    std::vector<uint8_t> bits() const {
        std::vector<uint8_t> all;
        const auto add = [&](const auto& values) {
            const auto* bytes = reinterpret_cast<const uint8_t*>(values.data());
            all.insert(all.end(), bytes, bytes + values.size() * sizeof(values[0]));
        };
        add(h.get());
        add(y.get());
        add(logits.get());
        add(slot_weight.get());
        add(logp.get());
        add(token.get());
        add(expert.get());
        add(best.get());
        return all;
    }
};

}  // namespace

// A sum whose order is that of arrival, a list that is filled in the order of blocks, memory that a later
// launch still uses: twenty launches while another stream keeps the device busy give the same bits.
KDT_CASE(the_same_bits_twenty_times_under_load) {
    Random random(111);
    for (const std::string precision : {"bf16", "f32"}) {
        Scene scene(backend(precision), random), load(backend(precision == "bf16" ? "f32" : "bf16"), random);
        scene.poison();
        load.poison();
        scene.issue();
        const std::vector<uint8_t> first = scene.bits();
        const auto recorded = scene.b.record([&] { scene.issue(); });
        const int turns = options().small ? 2 : 20;
        for (int turn = 0; turn < turns; ++turn) {
            scene.poison();
            if (turn > 0)
                for (int i = 0; i < (options().small ? 1 : 1 + turn % 3); ++i)
                    load.issue();  // not waited for
            if (turn % 2 == 0)
                scene.issue();
            else
                recorded->launch();
            expect_same(scene.bits(), first, format("%s, launch %d", precision.c_str(), turn + 2));
        }
        load.b.synchronize();
    }
}

// No rows taken for one, or for the capacity: nothing is written, and a later launch is as it was.
KDT_CASE(ops_of_no_rows_write_nothing) {
    Random random(112);
    for (const std::string precision : {"bf16", "f32"}) {
        Scene scene(backend(precision), random);
        scene.poison();
        scene.issue();
        const std::vector<uint8_t> wanted = scene.bits();
        scene.poison();
        const std::vector<uint8_t> untouched = scene.bits();
        scene.live.set({0});
        scene.issue();
        expect_same(scene.bits(), untouched, precision + ", no rows");
        scene.live.set({scene.rows});
        scene.issue();
        expect_same(scene.bits(), wanted, precision + ", and all of them again");
    }
}

// A row of zeros divided by zero, the square of a large value that overflows where the norm does not, values
// so small that only eps counts.
KDT_CASE(rms_norm_of_zeros_and_of_extremes) {
    Random random(113);
    for (const int width : {64, 1000}) {
        Backend& b = backend("bf16");
        const float scales[] = {0.0f, 1e-30f, 1e-6f, 1.0f, 1e6f, 1e15f};
        std::vector<float> x, weight(static_cast<size_t>(width));
        for (const float s : scales)
            for (int c = 0; c < width; ++c) x.push_back(s * random.symmetric());
        for (float& w : weight) w = random.symmetric();
        const float* dw = b.upload_vector(weight, "norm");
        const int rows = 6;
        const Device<float> dx(b, x);
        const Device<int32_t> live = scalar(b, rows);
        Device<float> y(b, x.size());
        b.rms_norm({{rows, live.data()}, dx.data(), width, dw, 1e-6f, width, y.data()});
        std::vector<double> wanted, bound;
        for (int r = 0; r < rows; ++r) {
            double sum = 0.0;
            const float* row = x.data() + r * width;
            for (int c = 0; c < width; ++c) sum += static_cast<double>(row[c]) * static_cast<double>(row[c]);
            for (int c = 0; c < width; ++c) {
                wanted.push_back(static_cast<double>(row[c]) / std::sqrt(sum / width + 1e-6) *
                                 static_cast<double>(weight[static_cast<size_t>(c)]));
                bound.push_back(2e-6 * std::fabs(wanted.back()) + 1e-37);
            }
        }
        expect_near(y.get(), wanted, bound, format("rows of %d", width));
    }
}

}  // namespace kdt::testing
