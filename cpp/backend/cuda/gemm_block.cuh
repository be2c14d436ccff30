// What the two tensor-core products share: which rows of which matrix a block and its warps have, and what
// becomes of their sums.
//
// Grid: x the K-splits (one cluster), y blocks of row tiles, z (head, group of tokens) or the active expert.
// A pair of row tiles over one K-split is 32 outputs, or 16 of gate and the same 16 of up: of one warp, or of
// several that have different tokens.
#pragma once

#include "backend/cuda/gemm.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/weight_stream.cuh"

namespace kdt::cuda {

// Eight consecutive activations, zero past the end of the row.
__device__ __forceinline__ void load_eight(float (&v)[8], const float* row, int column, int in, bool wide) {
    if (wide && column < in) {
        const float4 a = load_activation4(row + column), b = load_activation4(row + column + 4);
        v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    } else {
        for (int j = 0; j < 8; ++j) v[j] = column + j < in ? load_activation(row + column + j) : 0.0f;
    }
}

// The rows of one head, or of one expert, that a block has.
struct BlockRows {
    int first_row, first_tile, last_tile;

    __device__ __forceinline__ BlockRows(const GemmArgs& a, int head)
        : first_row(head * a.out),
          first_tile(first_row / kTileRows),
          last_tile((first_row + a.out - 1) / kTileRows) {}
};

// The columns of a block: its K-split, in blocks of 64 columns.
struct KSplit {
    int block0, blocks;

    __device__ __forceinline__ explicit KSplit(const GemmArgs& a) {
        const int split = static_cast<int>(blockIdx.x), splits = static_cast<int>(gridDim.x);
        block0 = split_border(a.k_blocks, split, splits);
        blocks = split_border(a.k_blocks, split + 1, splits) - block0;
    }
};

// The first row tile of a pair, which may lie past the last: then the pair is nobody's.
__device__ __forceinline__ int first_tile_of(const GemmArgs& a, const BlockRows& rows, int pair, int pairs) {
    return rows.first_tile +
           (static_cast<int>(blockIdx.y) * pairs + pair) * (a.store == Store::gated ? 1 : 2);
}

// Where the weights of a pair begin. Tiles past the last are those of the last: they stay inside the matrix,
// and their sums are not stored.
struct WarpWeights {
    const unsigned char* from[2];
    bool busy;

    __device__ __forceinline__ WarpWeights(const GemmArgs& a, const BlockRows& rows, const KSplit& split,
                                           const unsigned char* const (&base)[2], int pair, int pairs) {
        const bool gated = a.store == Store::gated;
        const int tile = first_tile_of(a, rows, pair, pairs);
        busy = tile <= rows.last_tile;
        const size_t row = static_cast<size_t>(a.k_blocks) * a.block_bytes;
        const size_t column = static_cast<size_t>(split.block0) * a.block_bytes;
        from[0] = base[0] + min(tile, rows.last_tile) * row + column;
        from[1] = (gated ? base[1] : base[0]) + min(gated ? tile : tile + 1, rows.last_tile) * row + column;
    }
};

// The pairs of block z's expert, where they are few: every warp looks at all of them, which takes one read
// instead of a kernel that makes lists and three reads that depend on each other.
struct ChosenPairs {
    static constexpr int kWords = kChosenPairs / 32;
    uint32_t bits[kWords];  // bit `lane` of word w: pair 32 w + lane
    int expert;
    bool leads;  // this block has them, not one before it

    __device__ __forceinline__ ChosenPairs(const GemmArgs& a, int lane) {
        const int z = static_cast<int>(blockIdx.z), capacity = a.rows.count * a.top_k;
        int id[kWords];
#pragma unroll
        for (int w = 0; w < kWords; ++w)
            id[w] = w * 32 + lane < capacity ? __ldcg(a.chosen + w * 32 + lane) : -1;
        expert = __ldcg(a.chosen + z);
        const int pairs = a.rows.live_count() * a.top_k;
        leads = z < pairs;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            bits[w] = __ballot_sync(0xFFFFFFFFu, w * 32 + lane < pairs && id[w] == expert);
            const int before = min(max(z - w * 32, 0), 32);
            if (before > 0 && (bits[w] << (32 - before)) != 0) leads = false;
        }
    }
    __device__ __forceinline__ int count() const {
        int n = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) n += __popc(bits[w]);
        return n;
    }
    // Row numbers of all of them, by one warp.
    __device__ __forceinline__ void fill_rows(const GemmArgs& a, int32_t* x_row, int32_t* y_row,
                                              int lane) const {
        int place = 0;
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
            const int at = place + __popc(bits[w] & ((1u << lane) - 1u)), pair = w * 32 + lane;
            if ((bits[w] >> lane & 1) != 0) {
                x_row[at] = a.x_first + pair / a.pair_divisor;
                y_row[at] = pair;
            }
            place += __popc(bits[w]);
        }
    }
};

// Row numbers of x and y of a group of tokens, in shared memory.
__device__ __forceinline__ void fill_rows(const GemmArgs& a, int32_t* x_row, int32_t* y_row, int first_token,
                                          int tokens, int slots, int thread, int threads) {
    for (int i = thread; i < slots; i += threads) {
        int x = 0, y = 0;
        if (i < tokens) {
            x = y = a.rows.first + first_token + i;
            if (a.pairs != nullptr) {
                y = __ldcg(a.pairs + first_token + i);
                x = a.x_first + y / a.pair_divisor;
            }
        }
        x_row[i] = x;
        y_row[i] = y;
    }
}

// Final value of one output: the sum over splits in order.
__device__ __forceinline__ float sum_splits(const float* mine, int splits) {
    if (splits == 1) return *mine;
    float sum = ptx::cluster_load(mine, 0);
    for (int s = 1; s < splits; ++s) sum += ptx::cluster_load(mine, static_cast<uint32_t>(s));
    return sum;
}

KDT_HOST_DEVICE constexpr int partial_stride(int pairs) {
    return pairs * 32 + 4;  // a quarter of a warp's writes in different banks
}

// Sums of a warp into the block's partial results [token][output], so that neighbouring threads hold
// neighbouring outputs: of its pair of row tiles and of `tokens` tokens at most.
template <int NT>
__device__ __forceinline__ void put_partials(float* partials, const float (&acc)[2][NT][4], int tokens,
                                             int pair, int pairs, int lane) {
    const int g = lane / 4, t = lane % 4, stride = partial_stride(pairs);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        if (n * 8 >= tokens) break;
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                partials[(n * 8 + 2 * t + i % 2) * stride + pair * 32 + tile * 16 + g + i / 2 * 8] =
                    acc[tile][n][i];
    }
}

// Adds the splits' partial results in order and stores what the op makes of them; the blocks of a cluster
// share the outputs. y_row(token): a row of y. Begins and ends with a barrier.
template <class Row>
__device__ __forceinline__ void store_outputs(const GemmArgs& a, const BlockRows& rows, const float* partials,
                                              const Row& y_row, int tokens, int head, int thread, int threads,
                                              int pairs) {
    const bool gated = a.store == Store::gated, experts = a.table[0] != nullptr;
    const int split = static_cast<int>(blockIdx.x), splits = static_cast<int>(gridDim.x);
    const int stride = partial_stride(pairs), outputs = pairs * (gated ? 16 : 32);  // of a token
    const int first = (rows.first_tile * kTileRows - rows.first_row) + static_cast<int>(blockIdx.y) * outputs;
    if (splits > 1)
        ptx::cluster_sync();
    else
        __syncthreads();
    const int step = splits * threads, token_step = step / outputs, o_step = step - token_step * outputs;
    int token = (split * threads + thread) / outputs, o = split * threads + thread - token * outputs;
    for (; token < tokens; token += token_step, o += o_step) {
        if (o >= outputs) {
            o -= outputs;
            if (++token >= tokens) break;
        }
        const int n = first + o;
        if (n < 0 || n >= a.out) continue;
        const float* mine = partials + token * stride + (gated ? o / 16 * 32 + o % 16 : o);
        float value = sum_splits(mine, splits);
        if (gated) value = silu(value) * sum_splits(mine + 16, splits);
        float* y = a.y + y_row(token) * a.y_stride + (experts ? 0 : head * a.y_head_stride) + n;
        if (a.store == Store::add) value = __ldcg(y) + value;
        if (a.store == Store::gate) value = silu(__ldcg(y)) * value;
        *y = value;
    }
    if (splits > 1)
        ptx::cluster_sync();  // nobody leaves or overwrites what others still read
    else
        __syncthreads();
}

}  // namespace kdt::cuda
