#include "testing.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <memory>

#include "core/arguments.h"

namespace kdt::testing {

namespace {

struct Case {
    const char* name;
    void (*run)();
};

std::vector<Case>& cases() {
    static std::vector<Case> list;
    return list;
}

Options the_options;
size_t checks = 0;
std::string (*after_case)() = nullptr;

}  // namespace

const Options& options() {
    return the_options;
}

Backend& backend(const std::string& precision) {
    static std::map<std::string, std::unique_ptr<Backend>> made;
    auto& b = made[precision];
    if (!b) {
        CudaOptions o;
        o.precision = precision;
        b = make_cuda_backend(o);
    }
    return *b;
}

void failed(const char* format, ...) {
    char text[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(text, sizeof text, format, args);
    va_end(args);
    throw Failure(text);
}

void set_after_case(std::string (*look)()) {
    after_case = look;
}

void count_checks(size_t n) {
    checks += n;
}

Registration::Registration(const char* name, void (*run)()) {
    cases().push_back({name, run});
}

uint64_t Random::bits() {  // splitmix64
    uint64_t z = state_ += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

std::vector<int> Random::permutation(int n) {
    std::vector<int> p(static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) p[static_cast<size_t>(i)] = i;
    for (int i = n - 1; i > 0; --i)
        std::swap(p[static_cast<size_t>(i)], p[static_cast<size_t>(below(i + 1))]);
    return p;
}

std::vector<float> random_values(Random& random, size_t n) {
    std::vector<float> x(n);
    for (float& v : x) v = random.symmetric();
    return x;
}

std::vector<float> floats_of(const std::vector<uint8_t>& bytes) {
    std::vector<float> v(bytes.size() / 4);
    std::memcpy(v.data(), bytes.data(), bytes.size());
    return v;
}

void expect_near(const std::vector<float>& got, const std::vector<double>& wanted,
                 const std::vector<double>& bound, const std::string& what) {
    if (got.size() != wanted.size())
        failed("%s: %zu entries; %zu were expected", what.c_str(), got.size(), wanted.size());
    count_checks(got.size());
    double worst = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double error = std::fabs(static_cast<double>(got[i]) - wanted[i]);
        if (!(error <= bound[i]))
            failed("%s: entry %zu is %.9g; %.9g +- %.3g was expected", what.c_str(), i,
                   static_cast<double>(got[i]), wanted[i], bound[i]);
        if (bound[i] > 0.0) worst = std::max(worst, error / bound[i]);
    }
    if (worst > 0.9)
        std::printf("    %s: the worst error is %.0f %% of its bound\n", what.c_str(), worst * 100.0);
}

uint16_t bf16_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (x != x) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

float bf16_value(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

float bf16_round(float x) {
    return bf16_value(bf16_bits(x));
}

std::vector<uint8_t> cache_bytes(const std::vector<float>& values, bool bf16) {
    std::vector<uint8_t> out(values.size() * (bf16 ? 2 : 4));
    for (size_t i = 0; i < values.size(); ++i) {
        const uint16_t half = bf16_bits(values[i]);
        if (bf16)
            std::memcpy(out.data() + 2 * i, &half, 2);
        else
            std::memcpy(out.data() + 4 * i, &values[i], 4);
    }
    return out;
}

HostMatrix TestMatrix::host() const {
    HostMatrix m;
    m.kind = kind;
    m.out = out;
    m.in = in;
    m.scale_dtype = scale_dtype;
    switch (kind) {
        case WeightKind::f32:
            m.data = f32.data();
            break;
        case WeightKind::bf16:
            m.data = bf16.data();
            break;
        case WeightKind::w4a16:
            m.data = words.data();
            m.scales = scale_dtype == DType::f32 ? static_cast<const void*>(scales.data()) : scales16.data();
            break;
    }
    return m;
}

TestMatrix random_matrix(Random& random, WeightKind kind, DType scale_dtype, int out, int in, bool integers) {
    TestMatrix m{kind, scale_dtype, out, in, {}, {}, {}, {}, {}, {}};
    const size_t n = static_cast<size_t>(out) * static_cast<size_t>(in);
    m.value.resize(n);
    if (kind != WeightKind::w4a16) {
        const float size = 1.0f / std::sqrt(static_cast<float>(in));
        for (float& v : m.value)
            v = integers ? static_cast<float>(random.between(-8, 7)) : random.symmetric() * size;
        if (kind == WeightKind::bf16) {
            for (float& v : m.value) {
                m.bf16.push_back(bf16_bits(v));
                v = bf16_round(v);
            }
        } else {
            m.f32 = m.value;
        }
        return m;
    }
    const size_t row = static_cast<size_t>(in), groups = row / kGroupSize;
    m.words.assign(n / 8, 0);
    const float size = 0.25f / std::sqrt(static_cast<float>(in));
    for (size_t r = 0; r < static_cast<size_t>(out); ++r) {
        for (size_t g = 0; g < groups; ++g) {
            float scale = integers ? 1.0f : size * static_cast<float>(0.5 + random.unit());
            if (scale_dtype == DType::bf16) {
                scale = bf16_round(scale);
                m.scales16.push_back(bf16_bits(scale));
            } else {
                m.scales.push_back(scale);
            }
            for (size_t j = 0; j < kGroupSize; ++j) {
                const size_t at = r * row + g * kGroupSize + j;
                const uint32_t q = static_cast<uint32_t>(random.below(16));
                m.words[at / 8] |= q << (at % 8 * 4);
                m.value[at] = static_cast<float>(static_cast<int>(q) - 8) * scale;
            }
        }
    }
    return m;
}

std::vector<int> row_counts() {
    if (options().small) return {2, 5, 9, 17};
    return {2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 65, 81};
}

float garbage(int kind, Random& random) {
    const float sign = random.below(2) ? 1.0f : -1.0f;
    return kind == 0 ? NAN : kind == 1 ? sign * INFINITY : sign * 1e30f;
}

void check_purity(const std::string& what, Random& random, int pool, const RunRows& run) {
    std::vector<std::vector<uint8_t>> alone(static_cast<size_t>(pool));
    for (int i = 0; i < pool; ++i) alone[static_cast<size_t>(i)] = run({i}, 1)[0];
    for (const int live : row_counts()) {
        for (int repeat = 0; repeat < 2; ++repeat) {
            std::vector<int> rows(static_cast<size_t>(live));
            for (int& r : rows) r = random.below(4) == 0 ? -1 - random.below(3) : random.below(pool);
            if (repeat == 0) rows[static_cast<size_t>(random.below(live))] = random.below(pool);
            const int capacity = live + (repeat == 0 ? 0 : random.below(9));
            const auto mixed = run(rows, capacity);
            for (int i = 0; i < live; ++i) {
                const int entry = rows[static_cast<size_t>(i)];
                if (entry < 0) continue;
                const auto& wanted = alone[static_cast<size_t>(entry)];
                const auto& got = mixed[static_cast<size_t>(i)];
                count_checks(1);
                if (got != wanted) {
                    size_t at = 0;
                    while (got[at] == wanted[at]) ++at;
                    failed(
                        "%s: row %d of %d (capacity %d) differs from the same row alone, first at byte %zu "
                        "of %zu",
                        what.c_str(), i, live, capacity, at, wanted.size());
                }
            }
        }
    }
}

void list_all() {
    for (const Case& c : cases()) std::printf("%s\n", c.name);
}

int run_all() {
    int ran = 0, bad = 0;
    size_t total = 0;
    for (const Case& c : cases()) {
        const std::string name = c.name;
        if (name.find(the_options.filter) == std::string::npos) continue;
        if (!the_options.only.empty() && name != the_options.only) continue;
        ++ran;
        checks = 0;
        const auto begin = std::chrono::steady_clock::now();
        std::string error;
        try {
            c.run();
            if (checks == 0) error = "compared nothing";
        } catch (const std::exception& e) {
            error = e.what();
        }
        if (after_case != nullptr) {
            const std::string also = after_case();
            error += error.empty() || also.empty() ? also : "; " + also;
        }
        const double seconds =
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        std::printf("%s  %-40s %10zu comparisons  %6.2f s%s%s\n", error.empty() ? "ok    " : "FAILED", c.name,
                    checks, seconds, error.empty() ? "" : "\n        ", error.c_str());
        std::fflush(stdout);
        total += checks;
        bad += !error.empty();
    }
    if (ran == 0) std::printf("no case has %s in its name\n", the_options.filter.c_str());
    std::printf("%d cases, %d failed, %zu comparisons\n", ran, bad, total);
    return bad == 0 && ran > 0 ? 0 : 1;
}

}  // namespace kdt::testing

int main(int argc, char** argv) {
    using namespace kdt::testing;
    bool list = false;
    const auto parse = [&](kdt::Arguments words) {
        while (words.next()) {
            if (words.is("--help") || words.is("-h")) return false;
            if (words.is("--small"))
                the_options.small = true;
            else if (words.is("--list"))
                list = true;
            else if (words.is("--filter"))
                the_options.filter = words.text();
            else if (words.is("--case"))
                the_options.only = words.text();
            else
                words.unknown();
        }
        return true;
    };
    const auto run = [&] {
        if (list) {
            list_all();
            return 0;
        }
        try {
            std::printf("%s\n", backend("bf16").description().c_str());
        } catch (const kdt::Error& e) {
            std::printf("NOT RUN (%s)\n", e.what());
            return 3;
        }
        return run_all();
    };
    return kdt::run_tool(
        "kdtree-cuda-tests", "usage: kdtree-cuda-tests [--list] [--small] [--filter TEXT] [--case NAME]\n",
        [&] { return parse({argc, argv}); }, run);
}
