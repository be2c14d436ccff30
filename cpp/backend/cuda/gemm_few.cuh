// The tensor-core product of up to 16 tokens (docs/kernels/gemm.md). Weights are the A operand (16 outputs),
// tokens the B operand (8 tokens): at few tokens the weight stream is all there is.
//
// Registers of a warp: a ring of kDepth steps of its two row tiles, straight from global memory; no barrier,
// no shared memory and no other warp stands between a weight and its product.
//
// Shared memory: rows | activations [token][columns] in bf16, rows 64 bytes apart modulo 128, so that a
// quarter of a warp reads its 16-byte pieces without a conflict | partial sums.
//
// Activations are rounded to bf16 by the block, as many columns at a time as fit: of a single token, whole
// rows. Splits are the blocks of a cluster; partial sums are added in split order through distributed shared
// memory.
#pragma once

#include "backend/cuda/gemm_block.cuh"

namespace kdt::cuda {

// `width` columns of all tokens into shared memory as bf16. A thread takes eight columns of one token at a
// time; with `Two`, where registers are at hand, it reads the next eight before it needs the first.
template <bool Two>
__device__ __forceinline__ void stage_activations(const GemmArgs& a, unsigned char* xs, const int32_t* x_row,
                                                  int tokens, int width, int column, int head, int thread,
                                                  int threads) {
    const int groups = width / 8, row_bytes = few_row_bytes(width);
    const auto load = [&](float (&v)[8], int token, int group) {
        load_eight(v, a.x + x_row[token] * a.x_stride + head * a.x_head_stride, column + group * 8, a.in,
                   a.wide);
    };
    const auto store = [&](const float (&v)[8], int token, int group) {
        *reinterpret_cast<uint4*>(xs + token * row_bytes + group * 16) =
            make_uint4(ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]),
                       ptx::pack_bf16(v[6], v[7]));
    };
    int token = 0, group = thread;
    while (group >= groups) group -= groups, ++token;
    const auto advance = [&]() {
        group += threads;
        while (group >= groups) group -= groups, ++token;
    };
#pragma unroll 1
    while (token < tokens) {
        float v[8];
        load(v, token, group);
        if constexpr (Two) {
            const int first_token = token, first_group = group;
            advance();
            float next[8];
            if (token < tokens) load(next, token, group);
            store(v, first_token, first_group);
            if (token < tokens) store(next, token, group);
        } else {
            store(v, token, group);
        }
        advance();
    }
}

// Warps of a block are pairs of row tiles, `Pairs` at most; `Blocks` such blocks fit an SM.
template <class Stream, int NT, int Pairs, int Blocks>
__global__ void __launch_bounds__(Pairs * 32, Blocks) gemm_few(const GemmArgs a) {
    constexpr int kTokens = NT * 8, kDepth = Stream::kDepth;
    constexpr int kRound = kDepth * Stream::kColumns;  // columns of one turn of the ring
    static_assert(kFewRound % kRound == 0);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
    const bool experts = a.table[0] != nullptr, waits_first = experts && !a.routed;
    if (waits_first) ptx::grid_wait();
    ptx::grid_launch_next();

    unsigned char* const shared = ptx::shared_memory();
    int32_t* const x_row = reinterpret_cast<int32_t*>(shared);
    int32_t* const y_row = x_row + a.row_slots;
    unsigned char* const xs = shared + a.row_slots * 8;
    float* const partials = reinterpret_cast<float*>(xs + a.activation_bytes);

    int head, first_token, tokens_left;
    const unsigned char* base[2] = {a.w[0], a.w[1]};
    if (experts) {
        int expert;
        head = first_token = 0;
        if (a.chosen != nullptr) {
            const ChosenPairs chosen(a, lane);
            if (!chosen.leads) return ptx::grid_wait();
            expert = chosen.expert;
            tokens_left = chosen.count();
            if (warp == 0) chosen.fill_rows(a, x_row, y_row, lane);
        } else {
            if (static_cast<int>(blockIdx.z) >= __ldcg(a.active_count)) return ptx::grid_wait();
            expert = __ldcg(a.active + blockIdx.z);
            first_token = __ldcg(a.offset + expert);
            tokens_left = __ldcg(a.offset + expert + 1) - first_token;
        }
        base[0] = static_cast<const unsigned char*>(a.table[0][expert]);
        base[1] = static_cast<const unsigned char*>(a.table[1][expert]);
    } else {
        head = static_cast<int>(blockIdx.z) % a.heads;
        first_token = static_cast<int>(blockIdx.z) / a.heads * kTokens;
        tokens_left = kTokens;  // at most; the count of live rows may be read only after the wait
    }
    const BlockRows rows(a, head);
    const KSplit split(a);
    const WarpWeights weights(a, rows, split, base, warp, warps);
    const int steps = split.blocks * (kBlockColumns / Stream::kColumns);

    using Cursor = typename Stream::template Lane<const unsigned char*>;
    typename Stream::Step ring[kDepth];
    Cursor next(weights.from[0], weights.from[1], lane);  // behind the ring
    const auto fill_ring = [&]() {
        next = Cursor(weights.from[0], weights.from[1], lane);
#pragma unroll
        for (int j = 0; j < kDepth; ++j)
            Stream::load(ring[j], next, j, FromGlobal{weights.busy && j < steps});
        next.advance(kDepth * Stream::kStepBytes);
    };
    // Weights depend on no earlier kernel: they are on their way before the wait. (Without a condition ptxas
    // moves the wait in front of them.)
    fill_ring();
    if (!waits_first) ptx::grid_wait();
    if (!experts) {
        tokens_left = min(kTokens, a.rows.live_count() - first_token);
    }

    for (bool again = false; tokens_left > 0; again = true) {
        const int tokens = min(tokens_left, kTokens);
        if (again) fill_ring();
        const int slot0 = a.chosen != nullptr ? first_token : 0;  // all rows are there, or this turn's
        if (a.chosen == nullptr) fill_rows(a, x_row, y_row, first_token, tokens, kTokens, thread, threads);
        __syncthreads();

        float acc[2][NT][4];
#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[tile][n][i] = 0.0f;

        const int columns = split.blocks * kBlockColumns;
        const int chunk = few_chunk_columns(a.activation_bytes, tokens);
        for (int c0 = 0; c0 < columns; c0 += chunk) {
            const int width = min(chunk, columns - c0), row_bytes = few_row_bytes(width);
            if (c0 > 0) __syncthreads();
            stage_activations<Blocks == 1>(a, xs, x_row + slot0, tokens, width,
                                           split.block0 * kBlockColumns + c0, head, thread, threads);
            __syncthreads();
            if (!weights.busy) continue;

            const unsigned char* x_at[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n)  // where there is no token, another's: nobody reads those sums
                x_at[n] = xs + min(n * 8 + lane / 4, tokens - 1) * row_bytes + lane % 4 * 16;
            const auto multiply = [&](int j) {
                Stream::template multiply<NT>(acc, ring[j], [&](int k, int n) {
                    return *reinterpret_cast<const uint4*>(x_at[n] + j * Stream::kColumns * 2 + k * 64);
                });
            };
            int step = c0 / Stream::kColumns;
            const int end = (c0 + width) / Stream::kColumns;
            const auto turn = [&]() {
#pragma unroll
                for (int j = 0; j < kDepth; ++j) {
                    multiply(j);
                    Stream::load(ring[j], next, j, FromGlobal{step + j + kDepth < steps});
                }
                next.advance(kDepth * Stream::kStepBytes);
#pragma unroll
                for (int n = 0; n < NT; ++n) x_at[n] += kRound * 2;
            };
            for (; step + kDepth <= end; step = ptx::opaque(step + kDepth))
                turn();  // two at once would spill
#pragma unroll
            for (int j = 0; j < kDepth - 1; ++j)  // the last turn, of the last piece alone
                if (step + j < end) multiply(j);
        }
        put_partials<NT>(partials, acc, tokens, warp, warps, lane);
        store_outputs(
            a, rows, partials, [&](int token) { return y_row[slot0 + token]; }, tokens, head, thread, threads,
            warps);
        tokens_left -= tokens;
        first_token += tokens;
        if (!experts) break;
    }
}

template <class Stream, int NT, int Pairs, int Blocks>
void launch_few_as(const GemmLaunch& l, const GemmArgs& args, const GemmCut& cut) {
    GemmArgs a = args;
    a.row_slots = a.chosen != nullptr ? kChosenPairs : NT * 8;
    const int columns = (a.k_blocks + cut.splits - 1) / cut.splits * kBlockColumns;
    a.activation_bytes = few_activation_bytes(columns, std::min(a.rows.count, NT * 8), Blocks == 1);
    launch<gemm_few<Stream, NT, Pairs, Blocks>>(
        {l.stream, l.device, l.name, dim3(cut.splits, cut.blocks, cut.groups), cut.pairs * 32,
         a.row_slots * 8 + a.activation_bytes + NT * 8 * partial_stride(cut.pairs) * 4, cut.splits},
        a);
}

// Up to 16 tokens a block; more take blocks of their own, and of an expert turns. A product with few warps,
// or much to do for each, gives them a deep ring of weights (`Deep`), and one block the SM; `Wide` leaves
// room for a second block, be it the next op's, whose weights are then on their way before this one has
// ended.
template <class Deep, class Wide>
void launch_few(const GemmLaunch& l, const GemmArgs& args, int experts, int splits) {
    constexpr bool nine = Deep::kDepth * Deep::kStepBytes <= 5120;  // what the ring leaves in registers
    const int tokens = experts > 0 ? args.usual_tokens : args.rows.count;
    const int nt = tokens <= 8 ? 1 : 2;
    const auto cut = [&](int most, int on_sm) {
        return cut_gemm(args.out, args.heads, args.store == Store::gated, args.rows.count, nt * 8, experts,
                        splits, l.machine, most, most * on_sm, experts > 0 && tokens > 2);
    };
    const GemmCut deep = cut(nine && nt == 1 ? 9 : 8, 1);
    if (deep.busiest <= 4 || (deep.busiest <= 9 && args.in / splits >= 4096)) {
        if constexpr (nine)
            if (deep.pairs > 8) return launch_few_as<Deep, 1, 9, 1>(l, args, deep);
        nt == 1 ? launch_few_as<Deep, 1, 8, 1>(l, args, deep) : launch_few_as<Deep, 2, 8, 1>(l, args, deep);
    } else {
        const GemmCut wide = cut(8, 2);
        nt == 1 ? launch_few_as<Wide, 1, 8, 2>(l, args, wide) : launch_few_as<Wide, 2, 8, 2>(l, args, wide);
    }
}

}  // namespace kdt::cuda
