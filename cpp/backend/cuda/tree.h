// Draft trees on the device: build, rows of a verify, the walk.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

inline constexpr int kMaxDraftPaths = 128;

void launch_build_tree(const GemmLaunch& l, const BuildTreeArgs& args);
void launch_tree_rows(const GemmLaunch& l, const TreeRowsArgs& args);
void launch_accept(const GemmLaunch& l, const AcceptArgs& args);

}  // namespace kdt::cuda
