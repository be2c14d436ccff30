// The bookkeeping around the experts' matrix products.
#pragma once

#include "backend/backend.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

// Which pairs (slice row * top_k + slot) each expert of a slice has, in ascending order.
struct PairLists {
    int32_t* active_count;  // scalar
    int32_t* active;        // [experts] those that have pairs, ascending
    int32_t* offset;        // [experts + 1]
    int32_t* pairs;         // [rows * top_k]
};
void launch_group_pairs(const GemmLaunch& l, RowSpan rows, int top_k, int experts, const int32_t* expert,
                        const PairLists& lists);

// y[row] += (sum over slots, in order, of weight * down[pair]) + shared[row]
struct CombineArgs {
    RowSpan rows;
    int top_k, hidden;
    const float* weight;  // [rows, top_k]
    const float* down;    // [slice rows * top_k, hidden]
    const float* shared;  // [rows, hidden] or null
    float* y;
};
void launch_combine(const GemmLaunch& l, const CombineArgs& args);

}  // namespace kdt::cuda
