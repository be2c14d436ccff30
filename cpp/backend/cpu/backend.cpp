// Construction, memory, workspace and the element-wise ops of the CPU backend.
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <string>
#include <thread>

#include "backend/cpu/cpu_backend.h"
#include "core/error.h"

namespace kdt {

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options) {
    return std::make_unique<cpu::CpuBackend>(options);
}

namespace cpu {

namespace {

constexpr int kMaxThreads = 1024;

size_t total(const std::map<std::string, size_t>& sizes) {
    size_t sum = 0;
    for (const auto& [name, size] : sizes) sum += size;
    return sum;
}

int choose_threads(int wanted) {
    if (wanted < 0 || wanted > kMaxThreads)
        fail(ErrorCode::invalid_argument, "threads is %d; 0 (one per core) to %d was expected", wanted,
             kMaxThreads);
    if (wanted > 0) return wanted;
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::clamp(CPU_COUNT(&set), 1, kMaxThreads);
#endif
    return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, kMaxThreads);
}

}  // namespace

CpuBackend::CpuBackend(const CpuOptions& options)
    : k_(choose_kernels(options.isa)), pool_(choose_threads(options.threads)) {
    local_.resize(static_cast<size_t>(pool_.size()));
    for (Local& local : local_) {
        local.out = Array<float>(size_t{2} * kMaxDotRows * kTileColumns, "scratch of a thread");
    }
}

std::string CpuBackend::description() const {
    return format("CPU, %s, %d thread%s", k_.name, pool_.size(), pool_.size() == 1 ? "" : "s");
}

void* CpuBackend::allocate(size_t bytes, const char* what) {
    return cpu::allocate(bytes, what);
}

void CpuBackend::release(void* pointer) {
    Free{}(pointer);
}

void CpuBackend::upload(void* device, const void* host, size_t bytes) {
    if (bytes > 0) std::memcpy(device, host, bytes);
}

void CpuBackend::download(void* host, const void* device, size_t bytes) {
    if (bytes > 0) std::memcpy(host, device, bytes);
}

void CpuBackend::fill(void* device, int byte, size_t bytes) {
    if (bytes > 0) std::memset(device, byte, bytes);
}

void CpuBackend::reserve_workspace(const WorkspaceSizes& sizes) {
    const Op op(*this);
    const size_t scores = size_t{2} * static_cast<size_t>(sizes.rows) * static_cast<size_t>(sizes.experts);
    const size_t slots =
        static_cast<size_t>(std::min(sizes.rows, kExpertRows)) * static_cast<size_t>(sizes.top_k);
    const auto grow = [](auto& array, size_t count, const char* what) {
        if (count > array.size()) array = std::remove_reference_t<decltype(array)>(count, what);
    };
    grow(route_scores_, scores, "workspace of the router");
    grow(expert_hidden_, slots * static_cast<size_t>(sizes.intermediate), "workspace of the experts");
    grow(expert_out_, slots * static_cast<size_t>(sizes.hidden), "workspace of the experts");
    grow(expert_slots_, slots, "workspace of the experts");
    grow(expert_starts_, static_cast<size_t>(sizes.experts) + 1, "workspace of the experts");
    for (Local& local : local_) {
        grow(local.values, static_cast<size_t>(sizes.vocab), "workspace of sampling");
        grow(local.probability, static_cast<size_t>(sizes.vocab), "workspace of sampling");
        grow(local.index, size_t{2} * static_cast<size_t>(sizes.vocab) + kSpareIndices,
             "workspace of sampling");
    }
}

int CpuBackend::live_rows(const Rows& rows) {
    const int live = rows.live == nullptr ? rows.capacity : *rows.live;
    if (live < 0 || live > rows.capacity)
        fail(ErrorCode::invalid_argument, "%d live rows; 0 to the capacity of %d were expected", live,
             rows.capacity);
    return live;
}

const PackedMatrix& CpuBackend::packed(const Weight& weight) {
    if (!weight) fail(ErrorCode::internal, "a weight that was never uploaded");
    return static_cast<const StoredMatrix*>(weight.data)->packed;
}

double CpuBackend::stream_sum(const float* x, size_t n) {
    const Op op(*this);
    std::vector<double> sums(static_cast<size_t>(pool_.size()), 0.0);
    pool_.split(static_cast<int64_t>(n), 1 << 16, [&](int64_t begin, int64_t end, int thread) {
        sums[static_cast<size_t>(thread)] +=
            static_cast<double>(k_.stream_sum(x + begin, static_cast<size_t>(end - begin)));
    });
    double total = 0.0;
    for (double sum : sums) total += sum;
    return total;
}

double CpuBackend::read_rate(size_t bytes, int passes) {
    const size_t n = std::max<size_t>(1, bytes / sizeof(float));
    const Array<float> x(n, "a buffer to read");
    std::fill_n(x.data(), n, 1.0f);
    double best = 0.0;
    for (int i = 0; i < std::max(1, passes); ++i) {
        const auto began = std::chrono::steady_clock::now();
        const volatile double sum = stream_sum(x.data(), n);
        static_cast<void>(sum);
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
        best = std::max(best, static_cast<double>(n * sizeof(float)) / std::max(seconds.count(), 1e-9));
    }
    return best;
}

// Caches of the highest level, each instance once: Linux names the processors that share it. sysconf is of no
// use, it reports the whole socket's to a virtual machine.
size_t CpuBackend::last_level_cache() const {
    int highest = 0;
    std::map<std::string, size_t> instances;
    for (int cpu = 0; cpu < 4096; ++cpu) {
        const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/cache/index";
        for (int index = 0; index < 8; ++index) {
            const auto read = [&](const char* name) {
                std::ifstream file(folder + std::to_string(index) + "/" + name);
                std::string text;
                std::getline(file, text);
                return text;
            };
            const std::string level = read("level"), type = read("type"), size = read("size");
            if (level.empty()) {
                if (index == 0) return total(instances);
                break;
            }
            if (type == "Instruction" || std::atoi(level.c_str()) < highest) continue;
            if (std::atoi(level.c_str()) > highest) instances.clear();
            highest = std::atoi(level.c_str());
            const size_t unit = size.ends_with('K') ? 1024 : size.ends_with('M') ? 1024 * 1024 : 1;
            instances[read("shared_cpu_list")] = std::strtoull(size.c_str(), nullptr, 10) * unit;
        }
    }
    return total(instances);
}

void CpuBackend::embed(const EmbedArgs& args) {
    const Op op(*this);
    const PackedMatrix& table = packed(args.table);
    if (table.format != Format::f32 && table.format != Format::bf16)
        fail(ErrorCode::unsupported, "an embedding table of INT4 weights; f32 or bf16 was expected");
    const int rows = live_rows(args.rows);
    for (int i = 0; i < rows; ++i)
        if (args.token[i] < 0 || args.token[i] >= table.out)
            fail(ErrorCode::invalid_argument, "token %d of row %d is outside the vocabulary of %d",
                 args.token[i], i, table.out);
    for (int i = 0; i < rows; ++i)
        k_.widen_row(table, args.token[i], args.y + static_cast<size_t>(i) * static_cast<size_t>(table.in));
}

void CpuBackend::rms_norm(const RmsNormArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    const int64_t grain = std::max(1, (1 << 15) / args.width);
    pool_.split(rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const float* x = args.x + i * args.x_stride;
            if (args.copy != nullptr) std::copy_n(x, args.width, args.copy + i * args.copy_stride);
            const float mean = k_.sum_of_squares(x, args.width) / static_cast<float>(args.width);
            const float r = 1.0f / std::sqrt(mean + args.eps);
            k_.scale_by(x, r, args.weight, args.width, args.y + i * args.width);
        }
    });
}

void CpuBackend::gather_rows(const GatherRowsArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    for (int j = 0; j < rows; ++j)
        if (args.index[j] < 0)
            fail(ErrorCode::invalid_argument, "row %d gathers row %d; rows start at 0", j, args.index[j]);
    for (int j = 0; j < rows; ++j)
        std::memmove(args.y + static_cast<ptrdiff_t>(j) * args.y_stride,
                     args.x + static_cast<ptrdiff_t>(args.index[j]) * args.width,
                     static_cast<size_t>(args.width) * sizeof(float));
}

void CpuBackend::reduce_ranks(const Rows& rows, float*, int) {
    live_rows(rows);  // one rank: the sum over ranks is what is there
}

}  // namespace cpu
}  // namespace kdt
