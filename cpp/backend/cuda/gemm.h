// Matrix products of activations and weights: dense, per head, and per expert. One argument struct, three
// kernels: `gemm_few` and `gemm_many` (bf16 operands on the tensor cores, float32 accumulation; the row count
// chooses, and no bit depends on it) and `fma_gemm` (float32 throughout).
#pragma once

#include "backend/cuda/device.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/plan.h"

namespace kdt::cuda {

enum class Store : uint8_t {
    write,  // y = v
    add,    // y = y + v
    gated,  // y = silu(v of w[0]) * (v of w[1])
    gate    // y = silu(y) * v
};

// y[row, head, n] = sum_k x[row, head, k] * w[head * out + n, k]
struct GemmArgs {
    RowSpan rows;
    const float* x;
    long long x_stride;  // of a row
    int x_head_stride;
    int in;
    const unsigned char* w[2];  // the matrix; for `gated` gate and up
    int k_blocks;
    int block_bytes;
    bool f32_scales;
    bool wide;  // every group of 8 columns of x lies whole inside the row and 16-byte aligned
    float* y;
    long long y_stride;
    int y_head_stride;
    int out;  // of one head
    int heads;
    Store store;
    const void* rounded;   // x in bf16 as gemm_many reads it; null: gemm_few, which rounds as it reads
    int activation_bytes;  // of shared memory, gemm_few
    int row_slots;         // row numbers of x, and of y, there

    // Experts: [experts] matrices in the places of w, null for dense products. A pair is row * top_k + slot.
    const void* const* table[2];
    int x_first, pair_divisor;  // x row = x_first + pair / pair_divisor; y row = pair
    int usual_tokens;           // of an expert; more are taken in turn
    // Either `chosen`: the expert of each of up to kChosenPairs pairs; block z takes all pairs of the expert
    // of pair z, unless an earlier pair has the same. Or lists: block z takes expert `active[z]` and its
    // `pairs`.
    const int32_t* chosen;
    int top_k;
    bool routed;  // these may be read before grid_wait: the kernel in front waited for them before it let
                  // this start
    const int32_t* active_count;
    const int32_t* active;
    const int32_t* offset;  // [experts + 1] into `pairs`
    const int32_t* pairs;
};

struct GemmLaunch {
    cudaStream_t stream;
    int device;
    const char* name;
    Machine machine;
};

// What cut_gemm wants to know of the current device, whose blocks have up to `shared_bytes`.
Machine look_at_machine(int sms, size_t shared_bytes);

// Activations of a product in bf16, in the order in which gemm_many reads them: [group of tokens][head][64
// columns], each [k32][token tile][lane] 8 values, zero past the live rows and past the last column.
// `rounded` has rounded_bytes(rows, heads, in).
void launch_round_activations(const GemmLaunch& l, const GemmArgs& args, void* rounded);

// Dense: args.rows.count shapes the launch. Experts: `experts` blocks along z.
void launch_gemm(const GemmLaunch& l, WeightKind kind, const GemmArgs& args, int experts);
void launch_fma_gemm(const GemmLaunch& l, WeightKind kind, const GemmArgs& args, int experts);

// One weight kind each, in its own translation unit.
void launch_gemm_f32(const GemmLaunch& l, const GemmArgs& args, int experts, int splits);
void launch_gemm_bf16(const GemmLaunch& l, const GemmArgs& args, int experts, int splits);
void launch_gemm_w4a16(const GemmLaunch& l, const GemmArgs& args, int experts, int splits);
void launch_gemm_w4a16_f32_scales(const GemmLaunch& l, const GemmArgs& args, int experts, int splits);

}  // namespace kdt::cuda
