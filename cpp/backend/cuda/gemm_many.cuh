// The tensor-core product of more tokens than gemm_few takes, up to 128 a block (docs/kernels/gemm.md).
//
// A block has up to nine pairs of row tiles. `Groups` warps share a pair and have NT token tiles each: enough
// warps that one multiplies while another unpacks weights or applies scales, and few enough accumulators
// that all of them fit. Two more warps fetch what they read.
//
// Shared memory: barriers | a ring of kSlots steps, of Stream::kColumns columns each; later the partial sums.
//
//            one step
//   activations   [k32][token tile][lane] 16 bytes, B fragments         (gemm_round.cu made them so)
//   weights       [pair][row tile] as in global memory, A fragments
//
//   last two warps   full[slot] ◄── copies ◄── empty[slot] ◄──┐
//   other warps      full[slot] ──► fragments ──► mma ─────────┘
//
// No warp waits for another but through these barriers: warps may be as far apart as the ring is long.
#pragma once

#include "backend/cuda/gemm_block.cuh"

namespace kdt::cuda {

template <class Stream, int NT, int Groups>
struct Many {
    static constexpr int kTiles = NT * Groups, kTokens = kTiles * 8;
    static constexpr int kMaxPairs = many_pairs(Groups, Stream::kStepBytes);
    static constexpr int kMaxThreads = (kMaxPairs * Groups + 2) * 32;
    static constexpr int kSlots = many_slots(kTiles, kMaxPairs, Stream::kColumns, Stream::kStepBytes);
    static constexpr int kActivationBytes = many_step_bytes(kTiles, 0, Stream::kColumns, 0);
    static constexpr int kPairBytes = 2 * Stream::kStepBytes;
    static constexpr int kSteps = kBlockColumns / Stream::kColumns;  // of 64 columns
    static constexpr int kBarrierBytes = 128;
    static_assert(kSlots * 16 <= kBarrierBytes);
};

// The ring as everyone sees it: where a step lies and which phase of its barriers is its own.
template <int Slots>
struct RingPlace {
    int slot = 0, phase = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == Slots) slot = 0, phase ^= 1;
    }
};

// An address that the compiler does not compute again in the inner loop to save its register.
__device__ __forceinline__ uint32_t keep(uint32_t address) {
    return static_cast<uint32_t>(ptx::opaque(static_cast<int>(address)));
}

// What one of the two copying warps takes of the weights: the first row tiles of all pairs, or the second,
// those that exist.
template <class Stream, int PairBytes>
struct TileCopy {
    static constexpr int kWhole = Stream::kStepBytes / 512;      // copies of a whole warp
    static constexpr int kRest = Stream::kStepBytes % 512 / 16;  // lanes that a tile's rest takes
    const unsigned char* from;
    size_t stride;  // from pair to pair
    uint32_t to;
    int lane, count;

    __device__ __forceinline__ TileCopy(const GemmArgs& a, const BlockRows& rows, const KSplit& split,
                                        int second, int pairs, uint32_t place, int thread_lane)
        : to(place + second * Stream::kStepBytes), lane(thread_lane) {
        const bool gated = a.store == Store::gated;
        const int step = gated ? 1 : 2, tile = first_tile_of(a, rows, 0, pairs) + (gated ? 0 : second);
        const size_t row = static_cast<size_t>(a.k_blocks) * a.block_bytes;
        count = max(0, min(pairs, (rows.last_tile - tile + step) / step));
        stride = step * row;
        from = (gated && second ? a.w[1] : a.w[0]) + tile * row +
               static_cast<size_t>(split.block0) * a.block_bytes;
    }
    __device__ __forceinline__ void copy(int step, int slot_offset) const {
        const unsigned char* source = from + static_cast<size_t>(step) * Stream::kStepBytes;
        const uint32_t target = to + slot_offset;
        const unsigned char* s = source + lane * 16;
        uint32_t t = target + lane * 16;
#pragma unroll 3
        for (int i = 0; i < count; ++i, s += stride, t += PairBytes)
#pragma unroll
            for (int j = 0; j < kWhole; ++j) ptx::copy_async_16(t + j * 512, s + j * 512);
        if constexpr (kRest > 0) {
            const int chunk = kWhole * 512 + lane % kRest * 16;
            for (int i = lane / kRest; i < count; i += 32 / kRest)
                ptx::copy_async_16(target + i * PairBytes + chunk, source + i * stride + chunk);
        }
    }
};

template <class Stream, int NT, int Groups>
__global__ void __launch_bounds__(Many<Stream, NT, Groups>::kMaxThreads, 1) gemm_many(const GemmArgs a) {
    using M = Many<Stream, NT, Groups>;
    constexpr int kSlots = M::kSlots;

    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int warp = thread / 32, lane = thread % 32, consumers = threads / 32 - 2;
    const int pairs = consumers / Groups, slot_bytes = M::kActivationBytes + pairs * M::kPairBytes;
    ptx::grid_launch_next();

    unsigned char* const shared = ptx::shared_memory();
    float* const partials = reinterpret_cast<float*>(shared + M::kBarrierBytes);
    const uint32_t full = keep(ptx::shared_address(shared)), empty = full + kSlots * 8;
    const uint32_t ring = full + M::kBarrierBytes;
    if (thread == 0) {
        for (int i = 0; i < kSlots; ++i) {
            ptx::barrier_init(full + i * 8, 2 * 32 + 1);  // lanes that copy weights; activations
            ptx::barrier_init(empty + i * 8, consumers * 32);
        }
        ptx::barrier_init_fence();
    }
    __syncthreads();

    const int head = static_cast<int>(blockIdx.z) % a.heads;
    const int first_token = static_cast<int>(blockIdx.z) / a.heads * M::kTokens;
    const BlockRows rows(a, head);
    const KSplit split(a);
    const int steps = split.blocks * M::kSteps, pair = warp / Groups, group = warp % Groups;
    int tokens;
    float acc[2][NT][4];  // of all warps but the copying ones

    if (warp >= consumers) {
        const TileCopy<Stream, M::kPairBytes> weights(a, rows, split, warp - consumers, pairs,
                                                      ring + M::kActivationBytes, lane);
        const int ahead = min(kSlots, steps);
        const bool copies_activations = warp == consumers && lane == 0;
        const unsigned char* const x =
            reinterpret_cast<const unsigned char*>(a.rounded) +
            (static_cast<size_t>(blockIdx.z) * a.k_blocks + split.block0) * M::kSteps * M::kActivationBytes;
        const auto copy_weights = [&](int step, int slot) {
            weights.copy(step, slot * slot_bytes);
            ptx::copy_async_arrive(full + slot * 8);
        };
        const auto copy_activations = [&](int step, int slot) {
            if (!copies_activations) return;
            ptx::barrier_arrive_expecting(full + slot * 8, M::kActivationBytes);
            ptx::bulk_copy(ring + slot * slot_bytes, x + static_cast<size_t>(step) * M::kActivationBytes,
                           M::kActivationBytes, full + slot * 8);
        };
        for (int i = 0; i < ahead; ++i) copy_weights(i, i);  // they depend on no earlier kernel
        ptx::grid_wait();
        tokens = min(M::kTokens, a.rows.live_count() - first_token);
        if (tokens <= 0) {  // nobody leaves before what was requested has landed
            for (int i = 0; i < ahead; ++i) {
                if (copies_activations) ptx::barrier_arrive(full + i * 8);
                ptx::barrier_wait(full + i * 8, 0);
            }
            return;
        }
        for (int i = 0; i < ahead; ++i) copy_activations(i, i);
        RingPlace<kSlots> at;
        for (int step = kSlots; step < steps; ++step) {
            ptx::barrier_wait(empty + at.slot * 8, at.phase);
            copy_activations(step, at.slot);
            copy_weights(step, at.slot);
            at.advance();
        }
    } else {
        const bool busy = first_tile_of(a, rows, pair, pairs) <= rows.last_tile;
        ptx::grid_wait();
        tokens = min(M::kTokens, a.rows.live_count() - first_token);
        if (tokens <= 0) return;

#pragma unroll
        for (int tile = 0; tile < 2; ++tile)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) acc[tile][n][i] = 0.0f;

        const uint32_t x = keep(ring + group * NT * 512 + lane * 16);
        const uint32_t w = keep(ring + M::kActivationBytes + pair * M::kPairBytes);
        const typename Stream::template Lane<uint32_t> first(w, w + Stream::kStepBytes, lane);
        RingPlace<kSlots> at;
        for (int step = 0; step < steps; ++step) {
            ptx::barrier_wait(full + at.slot * 8, at.phase);
            if (busy) {
                const int offset = at.slot * slot_bytes;
                auto next = first;
                next.advance(offset);
                typename Stream::Step s;
                Stream::load(s, next, 0, FromShared{});
                const auto b = [&](int k, int n) {
                    return ptx::load_shared_16(x + offset + (k * M::kTiles + n) * 512);
                };
                Stream::template multiply<NT>(acc, s, b);
            }
            ptx::barrier_arrive(empty + at.slot * 8);
            at.advance();
        }
    }
    __syncthreads();  // the ring becomes the place of partial sums
    if (warp < consumers) {
        put_partials<NT>(partials + group * NT * 8 * partial_stride(pairs), acc, tokens - group * NT * 8,
                         pair, pairs, lane);
    }
    store_outputs(
        a, rows, partials, [&](int token) { return a.rows.first + first_token + token; }, tokens, head,
        thread, threads, pairs);
}

template <class Stream, int NT, int Groups>
void launch_many_as(const GemmLaunch& l, const GemmArgs& args, int splits) {
    using M = Many<Stream, NT, Groups>;
    const GemmCut cut = cut_gemm(args.out, args.heads, args.store == Store::gated, args.rows.count,
                                 M::kTokens, 0, splits, l.machine, M::kMaxPairs, M::kMaxPairs, false);
    launch<gemm_many<Stream, NT, Groups>>(
        {l.stream, l.device, l.name, dim3(cut.splits, cut.blocks, cut.groups), (cut.pairs * Groups + 2) * 32,
         M::kBarrierBytes + std::max(M::kSlots * (M::kActivationBytes + cut.pairs * M::kPairBytes),
                                     M::kTokens * partial_stride(cut.pairs) * 4),
         cut.splits},
        args);
}

// Dense products alone; args.rounded holds the activations.
template <class Stream>
void launch_many(const GemmLaunch& l, const GemmArgs& args, int splits) {
    const ManyShape shape = many_shape(args.rows.count);
    const auto is = [&](int tiles, int groups) { return shape.tiles == tiles && shape.groups == groups; };
    if (is(2, 1)) return launch_many_as<Stream, 2, 1>(l, args, splits);
    if (is(3, 1)) return launch_many_as<Stream, 3, 1>(l, args, splits);
    if (is(4, 1)) return launch_many_as<Stream, 4, 1>(l, args, splits);
    if (is(5, 1)) return launch_many_as<Stream, 5, 1>(l, args, splits);
    if (is(4, 2)) return launch_many_as<Stream, 4, 2>(l, args, splits);
    if (is(5, 2)) return launch_many_as<Stream, 5, 2>(l, args, splits);
    return launch_many_as<Stream, 4, 4>(l, args, splits);
}

}  // namespace kdt::cuda
