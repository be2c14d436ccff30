#include "backend/cuda/gemm_few.cuh"
#include "backend/cuda/gemm_many.cuh"

namespace kdt::cuda {

void launch_gemm_w4a16(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    args.rounded != nullptr ? launch_many<W4Stream<false, 1>>(l, args, splits)
                            : launch_few<W4Stream<false, 8>, W4Stream<false, 4>>(l, args, experts, splits);
}

}  // namespace kdt::cuda
