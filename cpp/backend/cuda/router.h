// Which experts a row takes: the router's logits and the choice among them.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

inline constexpr int kMaxExperts = 1024;
inline constexpr int kMaxTopK = 32;
inline constexpr int kRouterColumns = 8192;  // of the router's own matrix product

// Whether `launch_router_logits` takes this matrix; others go through fma_gemm. A question of kind and shape.
bool has_router_kernel(const Weight& gate);
// logits: [rows, experts]
void launch_router_logits(const GemmLaunch& l, const RouteArgs& args, float* logits);
void launch_route(const GemmLaunch& l, const RouteArgs& args, const float* logits);

}  // namespace kdt::cuda
