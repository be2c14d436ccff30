#include "bench.h"

#include <algorithm>
#include <cstdio>
#include <ctime>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"
#include "core/error.h"

namespace kdt::bench {

namespace {

constexpr double kBytesPerMicrosecond = 4.3e6;  // a read rate measured on an H200

}  // namespace

uint64_t random_bits() {  // splitmix64
    static uint64_t state = 1;
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

float random_unit() {
    return static_cast<float>(random_bits() >> 40) * 0x1p-23f - 1.0f;
}

struct Bench::Clock {
    cuda::CudaBackend backend{CudaOptions{}};
    cudaEvent_t begin = nullptr, end = nullptr;

    Clock() {
        cuda::check(cudaEventCreate(&begin), "timing");
        cuda::check(cudaEventCreate(&end), "timing");
    }

    double milliseconds(Graph& graph) {
        cuda::check(cudaEventRecord(begin, backend.stream()), "timing");
        graph.launch();
        cuda::check(cudaEventRecord(end, backend.stream()), "timing");
        cuda::check(cudaEventSynchronize(end), "timing");
        float ms = 0.0f;
        cuda::check(cudaEventElapsedTime(&ms, begin, end), "timing");
        return static_cast<double>(ms);
    }
};

Bench::Bench(int replays) : clock_(std::make_unique<Clock>()), b(clock_->backend), replays_(replays) {}

Bench::~Bench() = default;

double Bench::time(int n, const std::function<void(int)>& op) {
    const auto graph = b.record([&] {
        for (int i = 0; i < n; ++i) op(i);
    });
    for (int i = 0; i < 3; ++i) graph->launch();
    std::vector<double> times;
    for (int i = 0; i < replays_; ++i) times.push_back(clock_->milliseconds(*graph));
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1000.0 / n;
}

void Bench::report(const std::string& name, int rows, double us, double bytes, double flops,
                   const std::string& note) {
    const double floor = bytes / kBytesPerMicrosecond;
    results_.push_back({name, rows, us, floor, bytes, flops, note});
    std::printf("%-44s rows %4d  %9.2f us", name.c_str(), rows, us);
    if (floor > 0.0)
        std::printf("  floor %8.2f us  %4.0f %%  %5.2f TB/s", floor, 100.0 * floor / us, bytes / us / 1e6);
    std::printf("  %s\n", note.c_str());
    std::fflush(stdout);
}

void Bench::write_record(const std::string& path) {
    const double read = b.read_rate(size_t{4} << 30, 5) / 1e9;  // the roof of the record's figures
    std::FILE* f = std::fopen(path.c_str(), "w");
    if (f == nullptr) fail(ErrorCode::io, "%s cannot be written", path.c_str());
    char date[32];
    const std::time_t now = std::time(nullptr);
    std::strftime(date, sizeof date, "%Y-%m-%d", std::gmtime(&now));
    std::fprintf(f,
                 "{\"device\": \"%s\", \"date\": \"%s\", \"replays\": %d, \"read_gb_per_second\": %.1f, "
                 "\"results\": [",
                 b.description().c_str(), date, replays_, read);
    for (size_t i = 0; i < results_.size(); ++i) {
        const Result& r = results_[i];
        std::fprintf(f,
                     "%s\n  {\"name\": \"%s\", \"rows\": %d, \"us\": %.3f, \"floor_us\": %.3f, "
                     "\"bytes\": %.0f, \"flops\": %.0f, \"note\": \"%s\"}",
                     i ? "," : "", r.name.c_str(), r.rows, r.microseconds, r.floor, r.bytes, r.flops,
                     r.note.c_str());
    }
    std::fprintf(f, "\n]}\n");
    if (std::fclose(f) != 0) fail(ErrorCode::io, "%s could not be written to its end", path.c_str());
}

float* Bench::floats(int rows, int width) {
    std::vector<float> v(static_cast<size_t>(rows) * static_cast<size_t>(width));
    for (float& x : v) x = random_unit();
    return array(v);
}

TreeArrays Bench::tree() {
    int32_t* const count = ints(1);
    int32_t* const token = ints(kMaxTreeRows);
    int32_t* const parent = ints(kMaxTreeRows);
    int32_t* const depth = ints(kMaxTreeRows);
    int32_t* const source = ints(kMaxTreeRows);
    return {count, token, parent, depth, source, array(std::vector<double>(kMaxTreeRows))};
}

RowBatch Bench::tree_rows() {
    RowBatch batch;
    batch.token = ints(kMaxTreeRows);
    batch.sequence = ints(kMaxTreeRows);
    batch.position = ints(kMaxTreeRows);
    batch.prefix = ints(kMaxTreeRows);
    batch.ancestor_count = ints(kMaxTreeRows);
    batch.ancestors = ints(kMaxTreeRows * kMaxAncestors);
    return batch;
}

}  // namespace kdt::bench
