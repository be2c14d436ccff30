// CUDA on a CPU, as far as this project's kernels use it: enough of the language and of the runtime for the
// .cu files to compile as C++ and run, thread by thread, on fibers. It exists to find mistakes without a GPU:
// shared memory and allocations start as NaN and end at guard pages; an asynchronous copy destroys its target
// when it is issued and fills it only when it is waited for; a warp whose lanes meet at different
// instructions, a block that meets at __syncthreads from two places, a deadlock and a kernel that never waits
// for its predecessor abort. It is no model of speed, and its mma.sync rounds differently from a GPU's.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <source_location>
#include <tuple>
#include <type_traits>

#include "races.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(n) alignas(n)

// ----------------------------------------------------------------------------------------------------------------
// types

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct int2 {
    int x, y;
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
inline int2 make_int2(int x, int y) {
    return {x, y};
}
inline uint2 make_uint2(uint32_t x, uint32_t y) {
    return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
    return {x, y, z, w};
}
inline float2 make_float2(float x, float y) {
    return {x, y};
}

// ----------------------------------------------------------------------------------------------------------------
// the machine

namespace kdt_emulator {

void block_barrier(const std::source_location& place);
void cluster_barrier(const std::source_location& place);
void note_grid_wait(const std::source_location& place);
void note_launch_next();
unsigned char* shared_memory();
const void* cluster_address(const void* mine, unsigned rank);
void copy_async(void* to, const void* from, bool valid);
void copy_async_commit();
void copy_async_wait(int pending, const std::source_location& place);
void copy_async_arrive(void* barrier, const std::source_location& place);
void bulk_copy(void* to, const void* from, int bytes, void* barrier);
void barrier_init(void* barrier, int count);
void barrier_arrive(void* barrier, int bytes, const std::source_location& place);
void store_async(void* to, const void* from, void* barrier);
void barrier_wait(void* barrier, int parity, const std::source_location& place);

// All lanes of a warp bring `bytes` of input and get `bytes_out` of output; the last one to arrive runs
// `compute` on everyone's input ([32], absent lanes marked in `present`).
struct Warp {
    const unsigned char (*in)[64];
    unsigned char (*out)[64];
    uint32_t present;
};
using Collective = void (*)(const Warp&);
// By the CUDA model only __syncwarp orders memory: shuffles, votes and fragments do not.
void warp_collective(Collective compute, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     bool orders_memory = false);

void run(int stream, dim3 grid, dim3 block, size_t shared_bytes, unsigned cluster,
         const std::function<void()>& kernel);

template <class In, class Out>
Out collective(Collective compute, const In& in) {
    static_assert(sizeof(In) <= 64 && sizeof(Out) <= 64);
    Out out;
    warp_collective(compute, &in, sizeof in, &out, sizeof out);
    return out;
}

template <class T>
struct Shuffle {
    T value;
    int lane;
};

template <class T>
KDT_UNCHECKED void do_shuffle(const Warp& w) {
    for (int l = 0; l < 32; ++l) {
        Shuffle<T> mine, other;
        std::memcpy(&mine, w.in[l], sizeof mine);
        std::memcpy(&other, w.in[mine.lane & 31], sizeof other);
        std::memcpy(w.out[l], &other.value, sizeof(T));
    }
}

KDT_UNCHECKED inline void do_ballot(const Warp& w) {
    uint32_t bits = 0;
    for (int l = 0; l < 32; ++l) bits |= static_cast<uint32_t>(w.in[l][0] != 0 && (w.present >> l & 1)) << l;
    for (int l = 0; l < 32; ++l) std::memcpy(w.out[l], &bits, 4);
}

KDT_UNCHECKED inline void do_match(const Warp& w) {
    for (int l = 0; l < 32; ++l) {
        uint32_t bits = 0;
        for (int m = 0; m < 32; ++m)
            bits |= static_cast<uint32_t>(std::memcmp(w.in[l], w.in[m], 4) == 0) << m;
        std::memcpy(w.out[l], &bits, 4);
    }
}

KDT_UNCHECKED inline void do_max(const Warp& w) {
    uint32_t greatest = 0;
    for (int l = 0; l < 32; ++l) {
        uint32_t x;
        std::memcpy(&x, w.in[l], 4);
        if (x > greatest) greatest = x;
    }
    for (int l = 0; l < 32; ++l) std::memcpy(w.out[l], &greatest, 4);
}

KDT_UNCHECKED inline void do_min(const Warp& w) {
    uint32_t least = 0xFFFFFFFFu;
    for (int l = 0; l < 32; ++l) {
        uint32_t x;
        std::memcpy(&x, w.in[l], 4);
        if ((w.present >> l & 1) && x < least) least = x;
    }
    for (int l = 0; l < 32; ++l) std::memcpy(w.out[l], &least, 4);
}

inline void do_nothing(const Warp&) {}

}  // namespace kdt_emulator

extern dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

// ----------------------------------------------------------------------------------------------------------------
// device functions

inline void __syncthreads(const std::source_location& place = std::source_location::current()) {
    kdt_emulator::block_barrier(place);
}
inline void __syncwarp(const std::source_location& place = std::source_location::current()) {
    int nothing = 0;
    kdt_emulator::warp_collective(kdt_emulator::do_nothing, &nothing, sizeof nothing, &nothing,
                                  sizeof nothing, !kdt_emulator::races::is_ignored(place));
}

template <class T>
T __shfl_sync(unsigned, T value, int lane) {
    return kdt_emulator::collective<kdt_emulator::Shuffle<T>, T>(kdt_emulator::do_shuffle<T>, {value, lane});
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int offset) {
    return __shfl_sync(mask, value, static_cast<int>(threadIdx.x % 32) ^ offset);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int offset) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    return __shfl_sync(mask, value, lane < offset ? lane : lane - offset);
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return kdt_emulator::collective<unsigned char, unsigned>(kdt_emulator::do_ballot, x ? 1 : 0);
}
inline bool __any_sync(unsigned mask, bool x) {
    return __ballot_sync(mask, x) != 0;
}
inline unsigned __match_any_sync(unsigned, int x) {
    return kdt_emulator::collective<int, unsigned>(kdt_emulator::do_match, x);
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    return kdt_emulator::collective<unsigned, unsigned>(kdt_emulator::do_max, x);
}

inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    return kdt_emulator::collective<unsigned, unsigned>(kdt_emulator::do_min, x);
}

KDT_UNCHECKED inline float __uint_as_float(unsigned x) {
    float y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline unsigned __float_as_uint(float x) {
    unsigned y;
    std::memcpy(&y, &x, 4);
    return y;
}
inline long long __double_as_longlong(double x) {
    long long y;
    std::memcpy(&y, &x, 8);
    return y;
}
inline double __hiloint2double(int high, int low) {
    const unsigned long long bits =
        static_cast<unsigned long long>(static_cast<unsigned>(high)) << 32 | static_cast<unsigned>(low);
    double x;
    std::memcpy(&x, &bits, 8);
    return x;
}
inline int __double2hiint(double x) {
    return static_cast<int>(__double_as_longlong(x) >> 32);
}
inline int __double2loint(double x) {
    return static_cast<int>(__double_as_longlong(x));
}
inline unsigned long long __float2ull_rn(float x) {
    return static_cast<unsigned long long>(std::nearbyint(x));
}
inline int __clz(int x) {
    return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}
inline int __popc(unsigned x) {
    return __builtin_popcount(x);
}
inline int __ffs(int x) {
    return __builtin_ffs(x);
}
inline int __ffsll(long long x) {
    return __builtin_ffsll(x);
}
inline int min(int a, int b) {
    return a < b ? a : b;
}
inline int max(int a, int b) {
    return a > b ? a : b;
}
template <class T>
T __ldcg(const T* p) {
    return *p;
}
// The race detector is told of an atomic as one access; what it does must not be seen besides.
namespace kdt_emulator {
template <class T, class F>
KDT_UNCHECKED T exchange(T* p, const F& f) {
    const T old = *p;
    *p = f(old);
    return old;
}
}  // namespace kdt_emulator
template <class T>
T atomicAdd(T* p, T x) {
    kdt_emulator::races::touch(p, sizeof(T), kdt_emulator::races::Access::atomic);
    return kdt_emulator::exchange(p, [x](T old) { return static_cast<T>(old + x); });
}
inline int atomicOr(int* p, int x) {
    kdt_emulator::races::touch(p, 4, kdt_emulator::races::Access::atomic);
    return kdt_emulator::exchange(p, [x](int old) { return old | x; });
}
inline int atomicMin(int* p, int x) {
    kdt_emulator::races::touch(p, 4, kdt_emulator::races::Access::atomic);
    return kdt_emulator::exchange(p, [x](int old) { return x < old ? x : old; });
}

// ----------------------------------------------------------------------------------------------------------------
// runtime

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100
};
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID {
    cudaLaunchAttributeProgrammaticStreamSerialization,
    cudaLaunchAttributeClusterDimension
};
struct cudaLaunchAttributeValue {
    int programmaticStreamSerializationAllowed;
    dim3 clusterDim;
};
struct cudaLaunchAttribute {
    cudaLaunchAttributeID id;
    cudaLaunchAttributeValue val;
};
using cudaStream_t = struct CudaStream*;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};
struct cudaDeviceProp {
    char name[64];
    int major, minor, multiProcessorCount;
    size_t totalGlobalMem;
    int l2CacheSize;
    size_t sharedMemPerBlockOptin;
};
constexpr unsigned cudaStreamNonBlocking = 1;
using cudaEvent_t = struct CudaEvent*;  // everything runs at once and in order: for the race detector alone
constexpr unsigned cudaEventDisableTiming = 2;

const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaMalloc(void** pointer, size_t bytes);
cudaError_t cudaFree(void* pointer);
cudaError_t cudaMallocHost(void** pointer, size_t bytes);
cudaError_t cudaFreeHost(void* pointer);
cudaError_t cudaMemGetInfo(size_t* free, size_t* total);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t);
cudaError_t cudaMemsetAsync(void* to, int byte, size_t bytes, cudaStream_t);
cudaError_t cudaSetDevice(int);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t);
cudaError_t cudaStreamSynchronize(cudaStream_t);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t);
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t);
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t);
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int);
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, const void*, const cudaLaunchConfig_t*);

enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
using cudaGraph_t = struct CudaGraph*;
using cudaGraphExec_t = struct CudaGraph*;
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode);
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long flags);
cudaError_t cudaGraphDestroy(cudaGraph_t);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t);
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t);

namespace kdt_emulator {
void queue(std::function<void()> work);  // runs it, or keeps it while a stream is captured
// Streams come in pairs, 0 and 1: a backend's, and the one beside it.
inline int stream_number(cudaStream_t stream) {
    const auto number = reinterpret_cast<uintptr_t>(stream);
    return number == 0 ? 0 : static_cast<int>((number - 1) % 2);
}
}  // namespace kdt_emulator

template <class... P, class... A>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(P...), const A&... args) {
    unsigned cluster = 1;
    for (unsigned i = 0; i < config->numAttrs; ++i)
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension)
            cluster = config->attrs[i].val.clusterDim.x;
    std::tuple<std::decay_t<P>...> copy(args...);
    const dim3 grid = config->gridDim, block = config->blockDim;
    const size_t shared = config->dynamicSmemBytes;
    const int stream = kdt_emulator::stream_number(config->stream);
    kdt_emulator::queue(
        [=] { kdt_emulator::run(stream, grid, block, shared, cluster, [&] { std::apply(kernel, copy); }); });
    return cudaSuccess;
}
