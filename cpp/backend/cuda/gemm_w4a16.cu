#include "backend/cuda/gemm.cuh"

namespace kdt::cuda {

void launch_gemm_w4a16(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    launch_gemm_as<WeightKind::w4a16>(l, args, experts, splits);
}

}  // namespace kdt::cuda
