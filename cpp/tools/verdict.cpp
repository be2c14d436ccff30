#include "tools/verdict.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/error.h"

namespace kdt {

namespace {

// harness.matrix has the same two.
constexpr double kToleranceF32 = 1e-5, kToleranceBf16 = 3e-2;

// The largest difference of one row; NaN where one is.
double row_difference(const float* got, const float* wanted, int vocab) {
    double largest = 0.0;
    for (int v = 0; v < vocab; ++v) {
        const double d = std::fabs(static_cast<double>(got[v]) - static_cast<double>(wanted[v]));
        if (!(d <= largest)) largest = d;
        if (std::isnan(d)) return d;
    }
    return largest;
}

// Of an even number of values the mean of the middle two; NaN where one is.
double median(std::vector<double> values) {
    if (values.empty() || std::any_of(values.begin(), values.end(), [](double x) { return std::isnan(x); }))
        return std::numeric_limits<double>::quiet_NaN();
    std::sort(values.begin(), values.end());
    const size_t half = values.size() / 2;
    return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2.0;
}

bool same_bits(const Decoding& a, const Decoding& b) {
    return a.tokens == b.tokens && a.logits.size() == b.logits.size() &&
           (a.logits.empty() ||
            std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) == 0);
}

}  // namespace

Verdict judge(const Decoding& oracle, int vocab, DType precision, const Decoding& run,
              const std::vector<float>& along, const Decoding* plain) {
    const bool rounded = precision == DType::bf16;
    const size_t wanted = oracle.tokens.size(), width = static_cast<size_t>(vocab);
    Verdict v;
    while (v.tokens_equal < std::min(run.tokens.size(), wanted) &&
           run.tokens[v.tokens_equal] == oracle.tokens[v.tokens_equal])
        ++v.tokens_equal;
    v.exact = run.tokens == oracle.tokens;
    double scale = 1.0;
    for (const float x : oracle.logits) scale = std::max(scale, std::fabs(static_cast<double>(x)));
    v.allowed = (rounded ? kToleranceBf16 : kToleranceF32) * scale;

    if (run.logits.size() != oracle.logits.size())
        v.faults.push_back(
            format("%zu logits are kept, %zu were expected", run.logits.size(), oracle.logits.size()));
    const std::vector<float>& logits = rounded ? along : run.logits;
    // behind a wrong token the text is another one: a decoding is compared up to there
    const size_t rows = std::min({rounded ? wanted : v.tokens_equal + 1, wanted, logits.size() / width});
    std::vector<double> differences;
    for (size_t r = 0; r < rows; ++r)
        differences.push_back(
            row_difference(logits.data() + r * width, oracle.logits.data() + r * width, vocab));
    for (const double d : differences)
        if (!(d <= v.largest)) v.largest = std::isnan(v.largest) ? v.largest : d;
    v.median = median(differences);
    if (rounded && rows < wanted)
        v.faults.push_back(
            format("%zu positions along the bundle's text have logits, %zu were expected", rows, wanted));
    if (const double judged = rounded ? v.median : v.largest; !(judged <= v.allowed))
        v.faults.push_back(format("logits differ from the oracle's by %.1e%s; %.1e is allowed", judged,
                                  rounded ? " at the median position" : "", v.allowed));
    if (!rounded && !v.exact)
        v.faults.push_back(
            format("%zu tokens, of which the first %zu are the bundle's; all %zu were expected",
                   run.tokens.size(), v.tokens_equal, wanted));
    if (plain != nullptr) {
        v.compared_bits = true;
        v.same_bits = same_bits(run, *plain);
        if (!v.same_bits) v.faults.push_back("tokens or logits are not the plain run's, bit for bit");
    }
    return v;
}

}  // namespace kdt
