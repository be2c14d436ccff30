// The tensor-core product of 17 to 72 tokens a block (docs/kernels/gemm.md): each weight fragment meets 3, 5,
// 7 or 9 token tiles, so that the tensor cores are the limit and not the instructions around them.
//
// Registers of a warp: accumulators of two row tiles x NT token tiles, and a ring of kDepth steps of weights.
//
// Shared memory: rows | a ring of kSlots pieces of activations, 64 columns of all tokens each, in B-fragment
// order [k32][token tile][lane] 16 bytes | later the partial sums.
//
// Activations come rounded and in this order (gemm_round.cu), by `cp.async`. One barrier a piece: whoever
// passes it knows that the piece has landed and that everyone is done with the piece whose slot the next copy
// overwrites.
#pragma once

#include "backend/cuda/gemm_block.cuh"

namespace kdt::cuda {

template <class Stream, int NT>
__global__ void __launch_bounds__(kManyWarps * 32, 2) gemm_many(const GemmArgs a) {
    constexpr int kTokens = NT * 8, kGroup = NT % 3 == 0 ? 3 : 1;
    constexpr int kSlots = kManySlots, kPieceBytes = many_piece_bytes(NT);
    constexpr int kSteps = kBlockColumns / Stream::kColumns;  // of a piece
    constexpr int kPieces = Stream::kDepth / kSteps;          // of one turn of the ring of weights
    static_assert(Stream::kDepth % kSteps == 0);

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / 32, lane = thread % 32, warps = threads / 32;
    ptx::grid_launch_next();

    unsigned char* const shared = ptx::shared_memory();
    int32_t* const x_row = reinterpret_cast<int32_t*>(shared);
    int32_t* const y_row = x_row + kTokens;
    unsigned char* const xs = shared + (kTokens * 8 + 127) / 128 * 128;
    const uint32_t xs_at = ptx::shared_address(xs);
    float* const partials = reinterpret_cast<float*>(xs);

    const int head = static_cast<int>(blockIdx.z) % a.heads;
    const int first_token = static_cast<int>(blockIdx.z) / a.heads * kTokens;
    const BlockRows rows(a, head);
    const WarpWeights weights(a, rows, a.w, warp, warps);
    const int pieces = weights.blocks, steps = pieces * kSteps;

    typename Stream::Step ring[Stream::kDepth];
    typename Stream::Lane next = Stream::lane_at(weights.from, lane);  // behind the ring
#pragma unroll
    for (int j = 0; j < Stream::kDepth; ++j) Stream::load(ring[j], next, j, weights.busy && j < steps);
    next.advance(Stream::kDepth * Stream::kStepBytes);

    ptx::grid_wait();
    const int tokens = min(kTokens, a.rows.live_count() - first_token);
    if (tokens <= 0) return;
    fill_rows(a, x_row, y_row, first_token, tokens, kTokens, thread, threads);
    __syncthreads();

    const unsigned char* const x =
        reinterpret_cast<const unsigned char*>(a.rounded) +
        (static_cast<size_t>(blockIdx.z) * a.k_blocks + weights.block0) * kPieceBytes + thread * 16;
    const auto copy_piece = [&](int piece) {
        if (piece < pieces) {
            const uint32_t to = xs_at + piece % kSlots * kPieceBytes + thread * 16;
            const unsigned char* from = x + static_cast<size_t>(piece) * kPieceBytes;
            for (int at = thread * 16; at < kPieceBytes; at += threads * 16)
                ptx::copy_async_16(to + at - thread * 16, from + at - thread * 16);
        }
        ptx::copy_async_commit();
    };
    for (int i = 0; i < kSlots - 1; ++i) copy_piece(i);

    float acc[2][NT][4];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[tile][n][i] = 0.0f;

    // One piece: wait for it, request a later one, multiply, and request the weights of the next turn.
    const auto turn = [&](int piece, int p) {
        ptx::copy_async_wait<kSlots - 2>();
        __syncthreads();
        copy_piece(piece + kSlots - 1);
        if (!weights.busy) return;
        const unsigned char* const at = xs + piece % kSlots * kPieceBytes + lane * 16;
#pragma unroll
        for (int j = 0; j < kSteps; ++j) {
            typename Stream::Step& step = ring[p * kSteps + j];
            Stream::template multiply<NT, kGroup>(acc, step, [&](int k, int n) {
                return *reinterpret_cast<const uint4*>(at +
                                                       ((j * (Stream::kColumns / 32) + k) * NT + n) * 512);
            });
            Stream::load(step, next, p * kSteps + j, piece * kSteps + j + Stream::kDepth < steps);
        }
    };
    int piece = 0;
    for (; piece + kPieces <= pieces; piece = ptx::opaque(piece + kPieces)) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) turn(piece + p, p);
        next.advance(Stream::kDepth * Stream::kStepBytes);
    }
#pragma unroll
    for (int p = 0; p < kPieces - 1; ++p)
        if (piece + p < pieces) turn(piece + p, p);
    ptx::copy_async_wait<0>();
    __syncthreads();
    put_partials<NT>(partials, acc, tokens, warp, warps, lane);
    store_outputs(a, rows, partials, y_row, tokens, head, thread, warps);
}

template <class Stream, int NT>
void launch_many_as(const GemmLaunch& l, const GemmArgs& args, const GemmCut& cut) {
    const int partial_bytes = NT * 8 * partial_stride(cut.warps) * 4;
    launch<gemm_many<Stream, NT>>(
        {l.stream, l.device, l.name, dim3(cut.splits, cut.blocks, cut.groups), cut.warps * 32,
         (NT * 64 + 127) / 128 * 128 + std::max(kManySlots * many_piece_bytes(NT), partial_bytes),
         cut.splits},
        args);
}

// Dense products alone; args.rounded holds the activations.
template <class Stream>
void launch_many(const GemmLaunch& l, const GemmArgs& args, int splits) {
    const int nt = many_token_tiles(args.rows.count);
    const GemmCut cut = cut_gemm(args.out, args.heads, args.store == Store::gated, args.rows.count, nt * 8, 0,
                                 splits, l.sms, kManyWarps, true);
    switch (nt) {
        case 3:
            return launch_many_as<Stream, 3>(l, args, cut);
        case 5:
            return launch_many_as<Stream, 5>(l, args, cut);
        case 7:
            return launch_many_as<Stream, 7>(l, args, cut);
        default:
            return launch_many_as<Stream, 9>(l, args, cut);
    }
}

}  // namespace kdt::cuda
