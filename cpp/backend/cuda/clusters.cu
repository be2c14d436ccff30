// How many clusters run at a time if a block fills its SM: GPCs have no whole number of clusters of SMs, so
// that it is less than the SMs divided by the cluster's size. plan.h cuts products accordingly.
#include "backend/cuda/gemm.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

__global__ void __launch_bounds__(32) nothing() {
    ptx::grid_wait();
}

}  // namespace

Machine look_at_machine(int sms, size_t shared_bytes) {
    Machine machine{sms, {sms, 1, 1, 1}};
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(nothing),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)),
          "looking at the GPU");
    for (size_t i = 1; i < machine.clusters.size(); ++i) {
        const unsigned size = 1u << i;
        cudaLaunchAttribute attribute = {};
        attribute.id = cudaLaunchAttributeClusterDimension;
        attribute.val.clusterDim.x = size;
        attribute.val.clusterDim.y = 1;
        attribute.val.clusterDim.z = 1;
        cudaLaunchConfig_t config = {};
        config.gridDim = dim3(size);
        config.blockDim = dim3(32);
        config.dynamicSmemBytes = shared_bytes;
        config.attrs = &attribute;
        config.numAttrs = 1;
        int clusters = 0;
        check(cudaOccupancyMaxActiveClusters(&clusters, reinterpret_cast<const void*>(nothing), &config),
              "looking at the GPU");
        machine.clusters[i] = clusters > 1 ? clusters : 1;
    }
    return machine;
}

}  // namespace kdt::cuda
