// Ops that treat each row by itself: embedding, norms, RoPE, the latent cache, copies.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

void launch_embed(const GemmLaunch& l, const EmbedArgs& args);
void launch_rms_norm(const GemmLaunch& l, const RmsNormArgs& args);
void launch_write_latent(const GemmLaunch& l, const WriteLatentArgs& args, bool bf16_cache);
void launch_rope_query(const GemmLaunch& l, const AbsorbQueryArgs& args);
void launch_gather_rows(const GemmLaunch& l, const GatherRowsArgs& args);
void launch_commit(const GemmLaunch& l, const CommitArgs& args, bool bf16_cache);

}  // namespace kdt::cuda
