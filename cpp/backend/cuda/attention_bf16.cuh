// What the warps of an attention block in bf16 share (attention_bf16.cu): its cut into columns, heads and
// steps, its shared memory and its barriers.
#pragma once

#include "backend/cuda/attention.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda::bf16_attention {

constexpr int kStepKeys = 32;
constexpr int kStages = 4;       // steps of K in the ring
constexpr int kFirstStages = 2;  // filled at the start, while queries pass through the others
constexpr int kMostUnits = 36;   // a unit is 8 columns, 16 bytes: half of 512 + 64
constexpr int kKeyBytes = kMostUnits * 16;
constexpr int kMostSteps = kMostUnits / 2;  // mma steps of 16 columns
constexpr int kSets = kStateSets;           // of score warps: steps in turn
constexpr int kOutputWarps = 4;
template <int MT>
constexpr int kScoreWarps = (kSets * MT);
template <int MT>
constexpr int kThreads = (kScoreWarps<MT> + kOutputWarps) * 32;
constexpr int kOutputTiles = 32 / kOutputWarps;  // tiles of 8 columns of an output warp
// A head's reference maximum moves only when a score exceeds it by more than 2^8: rescaling becomes rare, and
// P, up to 256, is as exact as below 1.
constexpr float kSlack = 8.0f;
constexpr int kScoreBytes = 16 * kStepKeys * 4;  // the partner's sums of a step and a tile

// A block's columns, in units: latents first, then rope.
struct Columns {
    int first_latent, latents, first_rope, ropes;

    __device__ __forceinline__ int units() const { return latents + ropes; }
    __device__ __forceinline__ int steps() const { return (latents + ropes + 1) / 2; }  // of 16 columns
    // In the row of a key or a query.
    __device__ __forceinline__ int column(int unit, int latent) const {
        return unit < latents ? (first_latent + unit) * 8 : latent + (first_rope + unit - latents) * 8;
    }
};

// Latent and rope widths: of every released model, known at compile time; or of any other, up to the same.
struct ReleasedShape {
    static constexpr bool kWhole = true;  // every unit and every output column is there
    static __device__ __forceinline__ constexpr int latent(const AttentionArgs&) { return 512; }
    static __device__ __forceinline__ constexpr int width(const AttentionArgs&) { return 576; }
    static __device__ __forceinline__ Columns columns(const AttentionArgs&, int rank) {
        return {rank * 32, 32, rank * 4, 4};
    }
};
struct AnyShape {
    static constexpr bool kWhole = false;
    static __device__ __forceinline__ int latent(const AttentionArgs& a) { return a.latent; }
    static __device__ __forceinline__ int width(const AttentionArgs& a) { return a.latent + a.rope; }
    // Odd counts: the latent's larger half and the rope's smaller one go together.
    static __device__ __forceinline__ Columns columns(const AttentionArgs& a, int rank) {
        const int latents = a.latent / 8, ropes = a.rope / 8, l = (latents + 1) / 2, r = ropes / 2;
        return rank == 0 ? Columns{0, l, 0, r} : Columns{l, latents - l, r, ropes - r};
    }
};

// A key's units are xor-ed by key / 2 % 4: eight keys' rows of an ldmatrix lie in different banks.
__device__ __forceinline__ int unit_at(int unit, int key) {
    return (unit ^ (key / 2 % 4)) << 4;
}

// What MT tiles of 16 heads need. Score warps of a set have a place of their own for each step: [set].
template <int MT>
struct Shared {
    unsigned char keys[kStages][kStepKeys * kKeyBytes];
    float4 score[kSets][MT][4][32];  // the partner's sums: [column tile][lane], as an accumulator has them
    uint4 weight[kSets][MT][2][32];  // P: [mma step][lane], as an A fragment has it
    float factor[kSets][MT * 16];    // of the output so far
    float maximum[kSets][MT * 16];   // the heads' reference maxima after a step
    uint8_t rescale[kSets][4];       // whether any factor of a tile differs from 1
    // Barriers: K is there; the partner's sums are, and one's own have been taken up there; a tile's maxima
    // are written; P of all tiles is; every output warp is done with P and with V.
    uint64_t loaded[kStages], met[kSets][MT], read[kSets][MT], passed[kSets][MT], weighed[kSets], used[kSets];

    __device__ __forceinline__ void init_barriers() {
        for (uint64_t& barrier : loaded) ptx::barrier_init(ptx::shared_address(&barrier), kOutputWarps * 32);
        for (int set = 0; set < kSets; ++set) {
            for (int m = 0; m < MT; ++m) {
                ptx::barrier_init(ptx::shared_address(&met[set][m]), 1);
                ptx::barrier_init(ptx::shared_address(&read[set][m]), 1);
                ptx::barrier_init(ptx::shared_address(&passed[set][m]), 32);
            }
            ptx::barrier_init(ptx::shared_address(&weighed[set]), MT * 32);
            ptx::barrier_init(ptx::shared_address(&used[set]), kOutputWarps * 32);
        }
    }
};
static_assert(sizeof(Shared<4>) <= kSharedMemoryLimit);

// `turn`: how often the barrier's place in its ring has been used before.
__device__ __forceinline__ void wait(uint64_t& barrier, int turn) {
    ptx::barrier_wait(ptx::shared_address(&barrier), turn & 1);
}

__device__ __forceinline__ void arrive(uint64_t& barrier) {
    ptx::barrier_arrive(ptx::shared_address(&barrier));
}

// What a cluster works on.
struct Part {
    KeySpan span;
    int row, head0, rank;
    int split;        // the first
    int step, steps;  // of kStepKeys keys

    // The step at which split `s` ends here, its last one excluded.
    __device__ __forceinline__ int split_end(int s) const {
        return min(split_start(s + 1) / kStepKeys - step, steps);
    }
};

}  // namespace kdt::cuda::bf16_attention
