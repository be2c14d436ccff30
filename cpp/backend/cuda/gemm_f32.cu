#include "backend/cuda/gemm.cuh"

namespace kdt::cuda {

void launch_gemm_f32(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    launch_gemm_as<WeightKind::f32>(l, args, experts, splits);
}

}  // namespace kdt::cuda
