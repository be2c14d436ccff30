// The groups of kdtree-bench-cuda; main.cpp names each group's shapes.
#pragma once

#include <string>
#include <vector>

#include "bench.h"

namespace kdt::bench {

// products.cpp. `rows`: row counts, each timed by itself. Matrices are [out, in].
void time_linear(Bench& bench, const std::string& label, WeightKind kind, int out, int in,
                 const std::vector<int>& rows);
void time_gated(Bench& bench, WeightKind kind, int out, int in, const std::vector<int>& rows);
void time_heads(Bench& bench, int heads, const std::vector<int>& rows);
void time_experts(Bench& bench, const std::string& label, int count, int top_k, int hidden, int inner,
                  const std::vector<int>& rows);

// attention.cpp. `lengths`: committed positions of the one sequence.
void time_attention(Bench& bench, int heads, const std::vector<int>& lengths, const std::vector<int>& rows);

// small_ops.cpp
void time_small_ops(Bench& bench, int hidden, int experts, int top_k, int vocab,
                    const std::vector<int>& rows);

// tree.cpp
void time_tree(Bench& bench);

// round.cpp
void time_round(Bench& bench);

}  // namespace kdt::bench
