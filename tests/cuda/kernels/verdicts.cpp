// The judge of golden bundles (cpp/tools/verdict.h) on made-up runs: what is right passes, each mutation
// fails.
#include "tools/verdict.h"

#include <cmath>

#include "testing.h"

namespace kdt::testing {

namespace {

constexpr int kVocab = 50, kTokens = 11;

struct Runs {
    Decoding oracle, plain, tree;
    std::vector<float> along;
};

// `error`: of every logit, relative to the largest of the oracle's, which is 4.
Runs runs(Random& random, float error) {
    Runs r;
    for (int t = 0; t < kTokens; ++t) r.oracle.tokens.push_back(random.below(kVocab));
    for (int i = 0; i < kTokens * kVocab; ++i) r.oracle.logits.push_back(4.0f * random.symmetric());
    r.oracle.logits[3] = -4.0f;
    r.plain = r.oracle;
    for (float& x : r.plain.logits) x += 4.0f * error * random.symmetric();
    r.tree = r.plain;
    r.along = r.plain.logits;
    return r;
}

void expect(bool pass, const Verdict& v, const char* what) {
    count_checks(1);
    if (v.pass() == pass) return;
    failed("%s: judged %s (%s)", what, pass ? "wrong" : "right",
           v.faults.empty() ? "no fault" : v.faults[0].c_str());
}

Verdict judged(const Runs& r, DType precision) {
    return judge(r.oracle, kVocab, precision, r.tree,
                 precision == DType::bf16 ? r.along : std::vector<float>{}, &r.plain);
}

}  // namespace

// bf16 held to a float32 oracle's tokens; a tree run that is not the plain one bit for bit let through;
// logits far from the oracle's, NaN, or missing taken for near.
KDT_CASE(verdict_of_bf16) {
    Random random(71);
    const auto bf16 = [&](const char* what, bool pass, const std::function<void(Runs&)>& change) {
        Runs r = runs(random, 0.01f);
        change(r);
        expect(pass, judged(r, DType::bf16), what);
    };
    bf16("as it should be", true, [](Runs&) {});
    bf16("other tokens than the oracle's, the same in both runs", true, [](Runs& r) {
        for (size_t t = 4; t < kTokens; ++t) r.plain.tokens[t] = r.tree.tokens[t] = 7;
    });
    bf16("a router chose otherwise at five of eleven positions", true, [](Runs& r) {
        for (size_t i = 0; i < 5 * kVocab; ++i) r.along[i] += 3.0f;
    });
    bf16("six of eleven positions are far off", false, [](Runs& r) {
        for (size_t i = 0; i < 6 * kVocab; ++i) r.along[i] += 3.0f;
    });
    bf16("one logit of every position is off by a little more than is allowed", false, [](Runs& r) {
        for (size_t t = 0; t < kTokens; ++t)
            r.along[t * kVocab + 5] = r.oracle.logits[t * kVocab + 5] + 0.1205f;
    });
    bf16("one logit of every position is off by a little less", true, [](Runs& r) {
        for (size_t t = 0; t < kTokens; ++t)
            r.along[t * kVocab + 5] = r.oracle.logits[t * kVocab + 5] + 0.1195f;
    });
    bf16("a NaN along the text", false, [](Runs& r) { r.along[3 * kVocab + 9] = NAN; });
    bf16("no logits along the text", false, [](Runs& r) { r.along.clear(); });
    bf16("the last position is missing", false, [](Runs& r) { r.along.resize((kTokens - 1) * kVocab); });
    bf16("the tree run's last bit of one logit", false,
         [](Runs& r) { r.tree.logits[77] = std::nextafter(r.tree.logits[77], 100.0f); });
    bf16("-0 for 0", false, [](Runs& r) {
        r.plain.logits[8] = 0.0f;
        r.tree.logits[8] = -0.0f;
    });
    bf16("another token in the tree run", false, [](Runs& r) { r.tree.tokens[kTokens - 1] += 1; });
    bf16("a token fewer in the tree run", false, [](Runs& r) {
        r.tree.tokens.pop_back();
        r.tree.logits.resize((kTokens - 1) * kVocab);
    });
    bf16("no logits kept at all", false, [](Runs& r) {
        r.tree.logits.clear();
        r.plain.logits.clear();
    });
}

// A float32 run let through with another token, one too few or too many, a logit off, or a NaN.
KDT_CASE(verdict_of_f32) {
    Random random(72);
    const auto f32 = [&](const char* what, bool pass, const std::function<void(Runs&)>& change) {
        Runs r = runs(random, 5e-6f);
        change(r);
        r.plain = r.tree;
        expect(pass, judged(r, DType::f32), what);
    };
    f32("as it should be", true, [](Runs&) {});
    f32("the last token", false, [](Runs& r) { r.tree.tokens[kTokens - 1] += 1; });
    f32("a token fewer", false, [](Runs& r) {
        r.tree.tokens.pop_back();
        r.tree.logits.resize((kTokens - 1) * kVocab);
    });
    f32("a token more", false, [](Runs& r) {
        r.tree.tokens.push_back(1);
        r.tree.logits.resize((kTokens + 1) * kVocab);
    });
    f32("one logit off by a little more than is allowed", false,
        [](Runs& r) { r.tree.logits[60] = r.oracle.logits[60] + 4.4e-5f; });
    f32("a NaN", false, [](Runs& r) { r.tree.logits[60] = NAN; });
    f32("bf16's tolerance is not f32's", false, [](Runs& r) {
        for (float& x : r.tree.logits) x += 0.01f;
    });
    Runs r = runs(random, 5e-6f);
    r.tree.logits[12] = std::nextafter(r.tree.logits[12], 100.0f);
    expect(false, judged(r, DType::f32), "the tree run's last bit of one logit");
}

}  // namespace kdt::testing
