// What this GPU's memory can do: the yardstick that reports put figures beside. Nothing here reaches a
// result.
#include <algorithm>
#include <chrono>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/ptx.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256, kLoads = 8;  // 16-byte loads in flight of each thread
constexpr int kPiece = kThreads * kLoads;  // of one block at a time: 32 KiB
constexpr int kBlocksPerMultiprocessor = 8;

// Reads pieces in turn. What it read is folded into one word, and written where that is not 0: the buffer
// holds zeros, which the compiler cannot know.
__global__ void __launch_bounds__(kThreads) read_all(const uint4* x, int pieces, uint32_t* sink) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    uint32_t folded = 0;
    for (int piece = static_cast<int>(blockIdx.x); piece < pieces; piece += static_cast<int>(gridDim.x)) {
        const uint4* at = x + static_cast<long long>(piece) * kPiece + threadIdx.x;
        uint4 v[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) v[i] = at[i * kThreads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i) folded |= v[i].x | v[i].y | v[i].z | v[i].w;
    }
    if (folded != 0) *sink = folded;
}

}  // namespace

double CudaBackend::read_rate(size_t bytes, int passes) {
    constexpr int kRepeats = 8;  // queued together, so that starting them is no part of the time
    const size_t piece = sizeof(uint4) * kPiece;
    const int pieces = static_cast<int>(std::clamp<size_t>(bytes / piece, 1, 1 << 20));
    const size_t size = piece * static_cast<size_t>(pieces);
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device_), "a read of memory");
    Buffer buffer(*this, size + sizeof(uint32_t), "a buffer to read");
    unsigned char* const data = buffer.as<unsigned char>();
    fill(data, 0, size + sizeof(uint32_t));
    const unsigned blocks = static_cast<unsigned>(properties.multiProcessorCount * kBlocksPerMultiprocessor);
    double best = 0.0;
    for (int i = 0; i <= std::max(1, passes); ++i) {  // the first one warms up
        synchronize();
        const auto began = std::chrono::steady_clock::now();
        for (int j = 0; j < kRepeats; ++j)
            launch<read_all>({stream_, device_, "a read of memory", dim3(blocks), kThreads},
                             reinterpret_cast<const uint4*>(data), pieces,
                             reinterpret_cast<uint32_t*>(data + size));
        synchronize();
        const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - began;
        if (i > 0)
            best = std::max(best, static_cast<double>(size) * kRepeats / std::max(seconds.count(), 1e-9));
    }
    return best;
}

size_t CudaBackend::last_level_cache() const {
    cudaDeviceProp properties;
    check(cudaGetDeviceProperties(&properties, device_), "asking for the size of the L2");
    return static_cast<size_t>(std::max(0, properties.l2CacheSize));
}

}  // namespace kdt::cuda
