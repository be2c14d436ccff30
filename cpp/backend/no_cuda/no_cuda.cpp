// The CUDA backend's symbols in a build without CUDA: a link-time choice instead of #ifdefs.
#include "backend/backend.h"
#include "core/error.h"

namespace kdt {

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) {
    fail(ErrorCode::unsupported,
         "this kdtree-engine was built without CUDA; build it with KDTREE_CUDA=ON or use --device cpu");
}

bool built_with_cuda() {
    return false;
}

GpuReport gpu_report() {
    GpuReport report;
    report.problem = "built without CUDA";
    return report;
}

}  // namespace kdt
