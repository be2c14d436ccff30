#include "backend/cuda/gemm_few.cuh"
#include "backend/cuda/gemm_many.cuh"

namespace kdt::cuda {

// INT4 with float32 scales: golden bundles. Released checkpoints have bf16 scales.
void launch_gemm_w4a16_f32_scales(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    args.rounded != nullptr ? launch_many<W4Stream<true, 1>>(l, args, splits)
                            : launch_few<W4Stream<true, 4>, W4Stream<true, 2>>(l, args, experts, splits);
}

}  // namespace kdt::cuda
