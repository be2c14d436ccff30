// Construction, memory and weights of the CUDA backend.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/repack.h"

#ifndef KDT_CUDA_ARCHITECTURES
#error "KDT_CUDA_ARCHITECTURES names the compiled architectures, as CMAKE_CUDA_ARCHITECTURES does"
#endif

namespace kdt {

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
    return std::make_unique<cuda::CudaBackend>(options);
}

bool built_with_cuda() {
    return true;
}

namespace cuda {

namespace {

constexpr size_t kStagingBytes = size_t{64} << 20;
constexpr size_t kAlignment = 256;

double gib(size_t bytes) {
    return static_cast<double>(bytes) / (1024.0 * 1024.0 * 1024.0);
}

size_t aligned(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

unsigned char* device_allocate(int device, size_t bytes, const char* what) {
    void* pointer = nullptr;
    const cudaError_t code = cudaMalloc(&pointer, std::max<size_t>(bytes, 1));
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError();  // this one is not sticky: the next call works
        size_t free = 0, total = 0;
        cudaMemGetInfo(&free, &total);
        fail(ErrorCode::out_of_memory, "%s needs %.2f GiB; %.2f of %.2f GiB are free on GPU %d", what,
             gib(bytes), gib(free), gib(total), device);
    }
    check(code, what);
    return static_cast<unsigned char*>(pointer);
}

// Whether native code for compute capability `major`.`minor` is among "90-real,120-real" and the like. Code
// for x.y runs on x.z where z >= y; an entry without "-real" also carries PTX, which runs on anything newer.
bool compiled_for(const char* list, int major, int minor) {
    for (const char* at = list; *at != '\0';) {
        const int number = std::atoi(at);
        const char* end = std::strchr(at, ',');
        const size_t length = end == nullptr ? std::strlen(at) : static_cast<size_t>(end - at);
        const bool has_ptx = std::string(at, length).find("-real") == std::string::npos;
        const int from_major = number / 10, from_minor = number % 10;
        if (from_major == major && from_minor <= minor) return true;
        if (has_ptx && (from_major < major || (from_major == major && from_minor <= minor))) return true;
        at += length + (end == nullptr ? 0 : 1);
    }
    return false;
}

}  // namespace

WeightArena::~WeightArena() {
    for (unsigned char* slab : slabs_) cudaFree(slab);
}

unsigned char* WeightArena::take(size_t bytes, const char* what) {
    bytes = aligned(bytes);
    if (bytes > left_) {
        constexpr size_t kFirst = size_t{4} << 20, kLargest = size_t{256} << 20;
        const size_t slab = std::max(bytes, std::min(kLargest, kFirst << std::min<size_t>(slabs_.size(), 6)));
        slabs_.reserve(slabs_.size() + 1);
        unsigned char* const data = device_allocate(device_, slab, what);
        slabs_.push_back(data);
        if (slab - bytes < left_) {  // what is left of the slab in hand is worth more
            used_ += bytes;
            return data;
        }
        next_ = data;
        left_ = slab;
    }
    unsigned char* const result = next_;
    next_ += bytes;
    left_ -= bytes;
    used_ += bytes;
    return result;
}

CudaBackend::CudaBackend(const CudaOptions& options) : device_(options.device), arena_(options.device) {
    if (options.precision != "bf16" && options.precision != "f32")
        fail(ErrorCode::invalid_argument,
             "the CUDA backend's precision is '%s'; 'bf16' or 'f32' was expected", options.precision.c_str());
    bf16_ = options.precision == "bf16";
    int driver = 0, runtime = 0, count = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    if (driver == 0)
        fail(ErrorCode::unsupported, "no NVIDIA driver was found; install one or use --device cpu");
    const cudaError_t code = cudaGetDeviceCount(&count);
    if (code == cudaErrorInsufficientDriver)
        fail(ErrorCode::unsupported,
             "the NVIDIA driver supports CUDA %d.%d and this build needs %d.%d; update the driver or use "
             "--device cpu",
             driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    if (code == cudaErrorNoDevice || (code == cudaSuccess && count == 0))
        fail(ErrorCode::unsupported, "the NVIDIA driver shows no GPU; use --device cpu");
    if (code != cudaSuccess)
        fail(ErrorCode::unsupported, "the NVIDIA driver could not be started: %s", cudaGetErrorString(code));
    if (device_ < 0 || device_ >= count)
        fail(ErrorCode::invalid_argument, "GPU %d was asked for; GPUs 0 to %d were found", device_,
             count - 1);

    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device_), "looking at the GPU");
    if (!compiled_for(KDT_CUDA_ARCHITECTURES, properties.major, properties.minor))
        fail(ErrorCode::unsupported,
             "GPU %d is %s of compute capability %d.%d, and this build has code for %s; build it with "
             "CMAKE_CUDA_ARCHITECTURES=%d%d",
             device_, properties.name, properties.major, properties.minor, KDT_CUDA_ARCHITECTURES,
             properties.major, properties.minor);
    description_ =
        format("%s (GPU %d, compute capability %d.%d, %d SMs, %.0f GiB), %s, driver CUDA %d.%d",
               properties.name, device_, properties.major, properties.minor, properties.multiProcessorCount,
               gib(properties.totalGlobalMem), options.precision.c_str(), driver / 1000, driver % 1000 / 10);
    check(cudaSetDevice(device_), "choosing the GPU");
    machine_ = look_at_machine(properties.multiProcessorCount, properties.sharedMemPerBlockOptin);
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "creating a stream");
    check(cudaStreamCreateWithFlags(&aside_stream_, cudaStreamNonBlocking), "creating a stream");
    check(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "creating an event");
    check(cudaEventCreateWithFlags(&aside_done_, cudaEventDisableTiming), "creating an event");
    bad_row_ = reinterpret_cast<int32_t*>(device_allocate(device_, sizeof(int32_t), "the backend's state"));
}

CudaBackend::~CudaBackend() {
    if (stream_ == nullptr) return;
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);
    cudaFree(bad_row_);
    cudaFree(staging_);
    for (unsigned char* workspace : workspace_) cudaFree(workspace);
    for (unsigned char* old : outgrown_workspaces_) cudaFree(old);
    cudaEventDestroy(forked_);
    cudaEventDestroy(aside_done_);
    cudaStreamDestroy(aside_stream_);
    cudaStreamDestroy(stream_);
}

void* CudaBackend::allocate(size_t bytes, const char* what) {
    check(cudaSetDevice(device_), what);
    void* const memory = device_allocate(device_, bytes, what);
    const char* const poison = std::getenv("KDTREE_POISON");
    if (poison != nullptr && std::strcmp(poison, "1") == 0)  // for tests: what nobody wrote reads as NaN
        check(cudaMemsetAsync(memory, 0xFF, bytes, line_ == 0 ? stream_ : aside_stream_), what);
    return memory;
}

void CudaBackend::release(void* pointer) {
    if (pointer == nullptr) return;
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);  // nothing queued may still use it
    cudaFree(pointer);
}

void* CudaBackend::allocate_host(size_t bytes, const char* what) {
    check(cudaSetDevice(device_), what);
    void* memory = nullptr;
    check(cudaMallocHost(&memory, bytes > 0 ? bytes : 1), what);
    return memory;
}

void CudaBackend::release_host(void* pointer) {
    if (pointer == nullptr) return;
    cudaSetDevice(device_);
    cudaStreamSynchronize(stream_);  // nothing queued may still use it
    cudaFreeHost(pointer);
}

void CudaBackend::upload(void* device, const void* host, size_t bytes) {
    if (bytes == 0) return;
    check(cudaSetDevice(device_), "upload");
    check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, stream_), "upload");
}

void CudaBackend::download(void* host, const void* device, size_t bytes) {
    check(cudaSetDevice(device_), "download");
    if (bytes > 0) check(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, stream_), "download");
    check(cudaStreamSynchronize(stream_), "download");
}

void CudaBackend::fill(void* device, int byte, size_t bytes) {
    if (bytes == 0) return;
    check(cudaSetDevice(device_), "fill");
    check(cudaMemsetAsync(device, byte, bytes, stream_), "fill");
}

void CudaBackend::synchronize() {
    check(cudaSetDevice(device_), "synchronize");
    check(cudaStreamSynchronize(stream_), "synchronize");
}

size_t CudaBackend::memory_available() const {
    size_t free = 0, total = 0;
    check(cudaSetDevice(device_), "asking for free memory");
    check(cudaMemGetInfo(&free, &total), "asking for free memory");
    return free;
}

namespace {

class CapturedGraph final : public Graph {
  public:
    CapturedGraph(int device, cudaStream_t stream, const std::function<void()>& ops)
        : device_(device), stream_(stream) {
        check(cudaSetDevice(device_), "recording ops");
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeRelaxed), "recording ops");
        cudaGraph_t graph = nullptr;
        try {
            ops();
        } catch (...) {
            cudaStreamEndCapture(stream_, &graph);
            if (graph != nullptr) cudaGraphDestroy(graph);
            throw;
        }
        check(cudaStreamEndCapture(stream_, &graph), "recording ops");
        const cudaError_t code = cudaGraphInstantiate(&exec_, graph, 0);
        cudaGraphDestroy(graph);
        check(code, "recording ops");
    }
    ~CapturedGraph() override {
        cudaSetDevice(device_);
        cudaStreamSynchronize(stream_);
        cudaGraphExecDestroy(exec_);
    }
    void launch() override {
        check(cudaSetDevice(device_), "launching recorded ops");
        check(cudaGraphLaunch(exec_, stream_), "launching recorded ops");
    }

  private:
    const int device_;
    const cudaStream_t stream_;
    cudaGraphExec_t exec_ = nullptr;
};

}  // namespace

std::unique_ptr<Graph> CudaBackend::record(std::function<void()> ops) {
    join_aside();
    try {
        return std::make_unique<CapturedGraph>(device_, stream_, ops);
    } catch (...) {
        aside_pending_ = false;  // what was queued aside belonged to the recording
        throw;
    }
}

void CudaBackend::repack(const HostMatrix& m, unsigned char* to, const std::string& name) {
    const bool w4 = m.kind == WeightKind::w4a16;
    const size_t in = static_cast<size_t>(m.in);
    const size_t row_bytes = m.kind == WeightKind::f32 ? in * 4 : w4 ? in / 2 : in * 2;
    const size_t scale_bytes = w4 ? in / kGroupSize * dtype_size(m.scale_dtype) : 0;
    const size_t tile_bytes = (row_bytes + scale_bytes) * kTileRows;
    const size_t staging = std::max(kStagingBytes, tile_bytes) + kAlignment;
    if (staging_ == nullptr || staging > kStagingBytes + kAlignment) {
        check(cudaStreamSynchronize(stream_), name.c_str());
        cudaFree(staging_);
        staging_ = nullptr;
        staging_ = device_allocate(device_, staging, "staging of weights");
    }
    const int chunk =
        static_cast<int>(std::clamp<size_t>(kStagingBytes / tile_bytes, 1, 1 << 20)) * kTileRows;
    check(cudaMemsetAsync(bad_row_, 0x7F, sizeof(int32_t), stream_), name.c_str());
    for (int row = 0; row < m.out; row += chunk) {
        const int rows = std::min(chunk, m.out - row);
        const size_t data_bytes = row_bytes * static_cast<size_t>(rows);
        unsigned char* const scales = staging_ + aligned(data_bytes);
        check(
            cudaMemcpyAsync(staging_, static_cast<const char*>(m.data) + row_bytes * static_cast<size_t>(row),
                            data_bytes, cudaMemcpyHostToDevice, stream_),
            name.c_str());
        if (w4)
            check(cudaMemcpyAsync(scales,
                                  static_cast<const char*>(m.scales) + scale_bytes * static_cast<size_t>(row),
                                  scale_bytes * static_cast<size_t>(rows), cudaMemcpyHostToDevice, stream_),
                  name.c_str());
        launch_repack({stream_, device_, name.c_str(), machine_}, m.kind,
                      {staging_, scales, row, rows, m.out, m.in, m.scale_dtype == DType::f32, to, bad_row_});
    }
    int32_t bad = 0;
    download(&bad, bad_row_, sizeof bad);
    if (bad < m.out)
        fail(ErrorCode::not_finite, "%s has %s in row %d of %d", name.c_str(),
             w4 ? "a scale that is NaN, infinite or so large that its weights are" : "NaN or infinity", bad,
             m.out);
}

Weight CudaBackend::upload_matrix(const HostMatrix& matrix, const std::string& name) {
    check(cudaSetDevice(device_), name.c_str());
    if (matrix.out < 1 || matrix.in < 1)
        fail(ErrorCode::bad_model, "%s has shape [%d, %d]; a matrix needs at least one row and one column",
             name.c_str(), matrix.out, matrix.in);
    if (matrix.data == nullptr) fail(ErrorCode::bad_model, "%s has no data", name.c_str());
    const bool w4 = matrix.kind == WeightKind::w4a16;
    if (w4 && matrix.in % kGroupSize != 0)
        fail(ErrorCode::bad_model, "%s has %d inputs; INT4 weights come in groups of %d", name.c_str(),
             matrix.in, kGroupSize);
    if (w4 && matrix.scales == nullptr) fail(ErrorCode::bad_model, "%s has no scales", name.c_str());
    if (w4 && matrix.scale_dtype != DType::f32 && matrix.scale_dtype != DType::bf16)
        fail(ErrorCode::bad_model, "%s has scales of type %s; f32 or bf16 was expected", name.c_str(),
             dtype_name(matrix.scale_dtype));
    Weight weight;
    weight.kind = matrix.kind;
    weight.out = matrix.out;
    weight.in = matrix.in;
    weight.scale_dtype = matrix.scale_dtype;
    unsigned char* const to = arena_.take(
        matrix_bytes(matrix.kind, matrix.scale_dtype == DType::f32, matrix.out, matrix.in), name.c_str());
    repack(matrix, to, name);
    weight.data = to;
    return weight;
}

const float* CudaBackend::upload_vector(std::span<const float> values, const std::string& name) {
    check(cudaSetDevice(device_), name.c_str());
    for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
            fail(ErrorCode::not_finite, "%s has %g at index %zu", name.c_str(),
                 static_cast<double>(values[i]), i);
    float* const to = reinterpret_cast<float*>(arena_.take(values.size_bytes(), name.c_str()));
    upload(to, values.data(), values.size_bytes());
    synchronize();
    return to;
}

ExpertSet CudaBackend::make_experts(std::span<const Weight> gate, std::span<const Weight> up,
                                    std::span<const Weight> down, const std::string& name) {
    if (gate.empty() || gate.size() != up.size() || gate.size() != down.size())
        fail(ErrorCode::bad_model,
             "%s has %zu gate, %zu up and %zu down matrices; the same number was expected", name.c_str(),
             gate.size(), up.size(), down.size());
    const auto alike = [](const Weight& a, const Weight& b) {
        return a.kind == b.kind && (a.kind != WeightKind::w4a16 || a.scale_dtype == b.scale_dtype);
    };
    for (size_t e = 0; e < gate.size(); ++e) {
        const Weight &g = gate[e], &u = up[e], &d = down[e];
        if (!g || !u || !d) fail(ErrorCode::internal, "%s: expert %zu was never uploaded", name.c_str(), e);
        if (g.in != gate[0].in || g.out != gate[0].out || u.in != g.in || u.out != g.out || d.in != g.out ||
            d.out != g.in)
            fail(ErrorCode::bad_model,
                 "%s: expert %zu has gate [%d, %d], up [%d, %d], down [%d, %d]; gate and up [%d, %d] and "
                 "down its "
                 "transpose's shape were expected",
                 name.c_str(), e, g.out, g.in, u.out, u.in, d.out, d.in, gate[0].out, gate[0].in);
        if (!alike(g, gate[0]) || !alike(u, gate[0]) || !alike(d, down[0]))
            fail(ErrorCode::unsupported,
                 "%s: expert %zu stores its weights in another type than expert 0; on CUDA all gate and up "
                 "matrices of "
                 "a layer have one type, and so have all down matrices",
                 name.c_str(), e);
    }
    const size_t count = gate.size();
    std::vector<const void*> pointers(3 * count);
    for (size_t e = 0; e < count; ++e) {
        pointers[e] = gate[e].data;
        pointers[count + e] = up[e].data;
        pointers[2 * count + e] = down[e].data;
    }
    check(cudaSetDevice(device_), name.c_str());
    const size_t bytes = pointers.size() * sizeof(void*);
    unsigned char* const table = arena_.take(bytes, name.c_str());
    upload(table, pointers.data(), bytes);
    synchronize();
    auto stored = std::make_unique<Experts>();
    stored->gate = reinterpret_cast<const void* const*>(table);
    stored->up = stored->gate + count;
    stored->down = stored->gate + 2 * count;
    stored->gate_like = gate[0];
    stored->down_like = down[0];
    ExpertSet set;
    set.count = static_cast<int>(count);
    set.hidden = gate[0].in;
    set.intermediate = gate[0].out;
    set.table = stored.get();
    experts_.push_back(std::move(stored));
    return set;
}

}  // namespace cuda

GpuReport gpu_report() {
    GpuReport report;
    report.architectures = KDT_CUDA_ARCHITECTURES;
    cudaDriverGetVersion(&report.driver);
    cudaRuntimeGetVersion(&report.runtime);
    int count = 0;
    const cudaError_t code = report.driver == 0 ? cudaErrorNoDevice : cudaGetDeviceCount(&count);
    if (report.driver == 0)
        report.problem = "no NVIDIA driver was found";
    else if (code == cudaErrorInsufficientDriver)
        report.problem = "the NVIDIA driver is older than this build needs";
    else if (code != cudaSuccess)
        report.problem = cudaGetErrorString(code);
    else if (count == 0)
        report.problem = "the NVIDIA driver shows no GPU";
    for (int i = 0; i < count; ++i) {
        cudaDeviceProp p;
        if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
        report.gpus.push_back({p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem,
                               cuda::compiled_for(KDT_CUDA_ARCHITECTURES, p.major, p.minor)});
    }
    return report;
}

}  // namespace kdt
