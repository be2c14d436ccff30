#include "backend/cuda/gemm_few.cuh"
#include "backend/cuda/gemm_many.cuh"

namespace kdt::cuda {

void launch_gemm_f32(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    args.rounded != nullptr ? launch_many<F32Stream<1>>(l, args, splits)
                            : launch_few<F32Stream<4>, F32Stream<2>>(l, args, experts, splits);
}

}  // namespace kdt::cuda
