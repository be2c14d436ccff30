// Launching kernels and turning CUDA's error codes into Error.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstdint>

#include "core/error.h"

namespace kdt::cuda {

// Every block of every kernel fits into this much shared memory: the limit of sm_120.
inline constexpr int kSharedMemoryLimit = 101376;

inline void check(cudaError_t code, const char* what) {
    if (code == cudaSuccess) return;
    const char* text = cudaGetErrorString(code);
    if (code == cudaErrorMemoryAllocation)
        fail(ErrorCode::out_of_memory, "%s: the GPU is out of memory", what);
    fail(ErrorCode::internal, "%s: CUDA says: %s", what, text);
}

struct Launch {
    cudaStream_t stream;
    int device;
    const char* name;  // of the op, for messages
    dim3 grid;
    int threads;
    int shared_bytes = 0;
    int cluster = 1;  // blocks along grid.x that share memory
};

// Launches `Kernel` so that it may start before its predecessor has finished (ptx::grid_wait).
template <auto Kernel, class... Args>
void launch(const Launch& l, const Args&... args) {
    if (l.grid.x == 0 || l.grid.y == 0 || l.grid.z == 0) return;
    if (l.shared_bytes > kSharedMemoryLimit)
        fail(ErrorCode::internal, "%s: a block wants %d bytes of shared memory; %d is the limit", l.name,
             l.shared_bytes, kSharedMemoryLimit);
    if (l.shared_bytes > 48 * 1024) {
        static std::atomic<uint64_t> configured{0};  // a bit per device
        const uint64_t bit = 1ull << (l.device % 64);
        if ((configured.load(std::memory_order_acquire) & bit) == 0) {
            check(cudaFuncSetAttribute(reinterpret_cast<const void*>(Kernel),
                                       cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMemoryLimit),
                  l.name);
            configured.fetch_or(bit, std::memory_order_release);
        }
    }
    cudaLaunchAttribute attributes[2] = {};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(l.cluster);
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = l.grid;
    config.blockDim = dim3(static_cast<unsigned>(l.threads));
    config.dynamicSmemBytes = static_cast<size_t>(l.shared_bytes);
    config.stream = l.stream;
    config.attrs = attributes;
    config.numAttrs = l.cluster > 1 ? 2 : 1;
    check(cudaLaunchKernelEx(&config, Kernel, args...), l.name);
}

}  // namespace kdt::cuda
