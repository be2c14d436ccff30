#include "backend/cuda/gemm_few.cuh"
#include "backend/cuda/gemm_many.cuh"

namespace kdt::cuda {

void launch_gemm_bf16(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    args.rounded != nullptr ? launch_many<Bf16Stream<1>>(l, args, splits)
                            : launch_few<Bf16Stream<8>, Bf16Stream<4>>(l, args, experts, splits);
}

}  // namespace kdt::cuda
