// What a row of logits says: the next token (`select`) and the k most probable ones (`top_k`).
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

inline constexpr int kMaxTopTokens = 256;

void launch_select(const GemmLaunch& l, const SelectArgs& args);
void launch_top_k(const GemmLaunch& l, const TopKArgs& args);

}  // namespace kdt::cuda
