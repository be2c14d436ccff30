// Attention of a draft block on the tensor cores: all rows of the block against the committed positions of
// their window and the block itself, grouped-query heads.
//
// A thread block takes one key head over one split of the positions and up to eight tiles, a warp each; a
// tile is 16 query heads of that key head, of ONE row. Keys and values of a chunk come from memory once for
// all of them; nothing of another row is near a row's arithmetic, and a key that the row does not see is zero
// in P and in V.
//
//            chunk of 64 positions, in a ring of three            warp w: row r_w, heads h .. h + 15
//   pages   [K 64 x head_dim | V 64 x head_dim] bf16     Q (registers) . K^T -> S 16 x 64 -> mask, softmax
//   block   ...                                          P (registers) . V   -> O 16 x head_dim (registers)
//
// Scores and P never leave the warp's registers: the accumulator layout of S is the operand layout of P.
// Positions are absolute and a chunk begins at a multiple of 64, so a page is a chunk and its address one
// look-up; only the chunks at the context's end mix pages and block.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/draft.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

static_assert(kChunkSize == kPageSize, "a chunk is looked up as a page");

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * 32;
constexpr int kTileHeads = 16;
constexpr int kStages = 3;
constexpr int kBlocksWanted = 512;  // thread blocks of one launch, about; fixes no bit

KDT_HOST_DEVICE constexpr int row_bytes(int width) {  // of a key or a value in shared memory
    return width * 2;
}
KDT_HOST_DEVICE constexpr int stage_bytes(int width) {
    return 2 * kChunkSize * row_bytes(width);
}

// Tiles of one row and key head.
KDT_HOST_DEVICE int head_tiles(int heads, int kv_heads) {
    return (heads / kv_heads + kTileHeads - 1) / kTileHeads;
}

// Requests a chunk's keys and values of one key head; what does not exist becomes zero. 16-byte units are
// xor-ed by key % 8, so that ldmatrix meets no bank twice.
template <int Width>
__device__ __forceinline__ void load_chunk(const BlockAttentionArgs& a, int sequence, int start, int chunk,
                                           int head, uint32_t to) {
    constexpr int kUnits = Width / 8;
    const int entry_bytes = 4 * a.kv_heads * a.head_dim;
    const long long slot = draft_slot(a.cache, sequence, chunk * kChunkSize);
    const unsigned char* const block = static_cast<const unsigned char*>(a.cache.block);
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < kChunkSize * 2 * kUnits; i += kThreads) {
        const int unit = i % kUnits, part = i / kUnits % 2, key = i / (2 * kUnits);
        const int p = chunk * kChunkSize + key;
        const bool committed = p < start;
        const bool there = committed ? slot >= 0 : p - start < a.block;
        const unsigned char* from = block;
        if (there)
            from = (committed ? static_cast<const unsigned char*>(a.cache.pages) + (slot + key) * entry_bytes
                              : block + static_cast<long long>(p - start) * entry_bytes) +
                   ((part * a.kv_heads + head) * a.head_dim + unit * 8) * 2;
        ptx::copy_async_16(to + (part * kChunkSize + key) * row_bytes(Width) + ((unit ^ (key & 7)) << 4),
                           from, there && unit * 8 < a.head_dim);
    }
}

template <int Width>
__global__ void __launch_bounds__(kThreads, 1) block_attend(const BlockAttentionArgs a) {
    constexpr int kSteps = Width / 16, kColumnTiles = Width / 8, kKeyTiles = kChunkSize / 8;
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4, t = lane % 4;
    const int key_head = static_cast<int>(blockIdx.y), group = a.heads / a.kv_heads;
    const int tiles_of_row = head_tiles(a.heads, a.kv_heads), live = a.rows.live_count();
    const int tile0 = static_cast<int>(blockIdx.z) * kWarps;
    const int sequence = __ldcg(a.sequence), start = __ldcg(a.start);

    // What this warp's row sees, and what any row of this block does.
    BlockSpan all{INT32_MAX, -1}, mine{0, -1};
    for (int i = 0; i < kWarps; ++i) {
        const int row = (tile0 + i) / tiles_of_row;
        if (row >= live) break;
        const BlockSpan span = block_span(a, start, a.rows.first + row);
        if (i == warp) mine = span;
        if (span.last < span.first) continue;
        all.first = min(all.first, span.first);
        all.last = max(all.last, span.last);
    }
    if (all.last < all.first) return;

    const int slice_row = (tile0 + warp) / tiles_of_row;  // may lie past the live rows: `mine` is empty then
    const int head0 = (tile0 + warp) % tiles_of_row * kTileHeads;  // within the group
    uint32_t q[kSteps][4];
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const int head = head0 + g + r % 2 * 8, column = i * 16 + 2 * t + r / 2 * 8;
            float2 v = make_float2(0.0f, 0.0f);
            if (mine.first <= mine.last && head < group && column < a.head_dim)
                v = __ldcg(reinterpret_cast<const float2*>(
                    a.q +
                    (static_cast<long long>(a.rows.first + slice_row) * a.heads + key_head * group + head) *
                        a.head_dim +
                    column));
            q[i][r] = ptx::pack_bf16(v.x, v.y);
        }

    const uint32_t ring = ptx::shared_address(ptx::shared_memory());
    // Where this lane's ldmatrix rows begin, the xor of their units applied: bits 4 to 6 are free below it.
    const uint32_t key_lane = static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * row_bytes(Width) +
                                                    ((lane / 8 % 2 ^ lane % 8) << 4));
    const uint32_t value_lane = static_cast<uint32_t>((lane / 8 % 2 * 8 + lane % 8) * row_bytes(Width) +
                                                      ((lane / 16 ^ lane % 8) << 4));
    const int last_split = a.splits.of(all.last);
    for (int split = a.splits.of(all.first) + static_cast<int>(blockIdx.x); split <= last_split;
         split += static_cast<int>(gridDim.x)) {
        const int chunk0 = max(a.splits.start(split), all.first) / kChunkSize;
        const int chunk1 = min(a.splits.start(split + 1) - 1, all.last) / kChunkSize;
        for (int i = 0; i < kStages - 1; ++i) {
            if (chunk0 + i <= chunk1)
                load_chunk<Width>(a, sequence, start, chunk0 + i, key_head, ring + i * stage_bytes(Width));
            ptx::copy_async_commit();
        }
        float o[kColumnTiles][4];
#pragma unroll
        for (int n = 0; n < kColumnTiles; ++n)
            for (int i = 0; i < 4; ++i) o[n][i] = 0.0f;
        float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};  // of heads g and g + 8

        for (int chunk = chunk0, stage = 0; chunk <= chunk1; ++chunk, stage = (stage + 1) % kStages) {
            ptx::copy_async_wait<kStages - 2>();
            __syncthreads();  // this chunk is here, and nobody reads the one before any more
            if (chunk + kStages - 1 <= chunk1)
                load_chunk<Width>(a, sequence, start, chunk + kStages - 1, key_head,
                                  ring + (stage + kStages - 1) % kStages * stage_bytes(Width));
            ptx::copy_async_commit();
            const int low = mine.first - chunk * kChunkSize, high = mine.last - chunk * kChunkSize;
            if (high < 0 || low >= kChunkSize) continue;  // the row sees none of these keys
            const uint32_t keys = ring + stage * stage_bytes(Width);
            const uint32_t values = keys + kChunkSize * row_bytes(Width);

            float s[kKeyTiles][4];
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
                for (int i = 0; i < 4; ++i) s[n][i] = 0.0f;
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
#pragma unroll
                for (int n = 0; n < kKeyTiles; n += 2) {
                    uint32_t b[4];
                    ptx::ldmatrix_x4(b, ((keys + key_lane) ^ static_cast<uint32_t>(i % 4 << 5)) +
                                            i / 4 * 128 + n * 8 * row_bytes(Width));
                    ptx::mma_bf16(s[n], q[i][0], q[i][1], q[i][2], q[i][3], b[0], b[1]);
                    ptx::mma_bf16(s[n + 1], q[i][0], q[i][1], q[i][2], q[i][3], b[2], b[3]);
                }

            float greatest[2] = {-INFINITY, -INFINITY};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int key = n * 8 + 2 * t + i % 2;
                    s[n][i] = key >= low && key <= high ? s[n][i] * a.scale_log2 : -INFINITY;
                    greatest[i / 2] = fmaxf(greatest[i / 2], s[n][i]);
                }
            float shrink[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(0xFFFFFFFFu, greatest[r], 1));
                greatest[r] = fmaxf(greatest[r], __shfl_xor_sync(0xFFFFFFFFu, greatest[r], 2));
                const float now = fmaxf(m[r], greatest[r]);
                shrink[r] = ptx::exp2_approx(m[r] - now);
                m[r] = now;
            }
            uint32_t p[kKeyTiles][2];  // heads g and g + 8, a pair of keys each
            float sum[2] = {0.0f, 0.0f};
#pragma unroll
            for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    p[n][r] = ptx::pack_bf16(ptx::exp2_approx(s[n][2 * r] - m[r]),
                                             ptx::exp2_approx(s[n][2 * r + 1] - m[r]));
                    const float2 rounded = widen_bf16x2(p[n][r]);
                    sum[r] += rounded.x + rounded.y;
                }
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 1);
                sum[r] += __shfl_xor_sync(0xFFFFFFFFu, sum[r], 2);
                l[r] = fmaf(l[r], shrink[r], sum[r]);
            }
#pragma unroll
            for (int n = 0; n < kColumnTiles; ++n)
                for (int i = 0; i < 4; ++i) o[n][i] *= shrink[i / 2];
#pragma unroll
            for (int step = 0; step < kKeyTiles / 2; ++step) {
                // A key that the row does not see may hold anything, and zero times that is not always zero.
                uint32_t seen[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int key = step * 16 + half * 8 + 2 * t;
                    seen[half] = (key >= low && key <= high ? 0x0000FFFFu : 0u) |
                                 (key + 1 >= low && key + 1 <= high ? 0xFFFF0000u : 0u);
                }
#pragma unroll
                for (int n = 0; n < kColumnTiles; n += 2) {
                    uint32_t v[4];
                    ptx::ldmatrix_x4_transposed(
                        v, ((values + value_lane) ^ static_cast<uint32_t>(n % 8 << 4)) + n / 8 * 128 +
                               step * 16 * row_bytes(Width));
                    ptx::mma_bf16(o[n], p[2 * step][0], p[2 * step][1], p[2 * step + 1][0],
                                  p[2 * step + 1][1], v[0] & seen[0], v[1] & seen[1]);
                    ptx::mma_bf16(o[n + 1], p[2 * step][0], p[2 * step][1], p[2 * step + 1][0],
                                  p[2 * step + 1][1], v[2] & seen[0], v[3] & seen[1]);
                }
            }
        }

        if (mine.first < a.splits.start(split + 1) && mine.last >= a.splits.start(split) &&
            mine.first <= mine.last) {
            const int slot = split - a.splits.of(mine.first);
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int head = head0 + g + r * 8;
                if (head >= group) continue;
                const long long at =
                    (static_cast<long long>(slice_row) * a.heads + key_head * group + head) * a.parts + slot;
#pragma unroll
                for (int n = 0; n < kColumnTiles; ++n) {
                    const int column = n * 8 + 2 * t;
                    if (column < a.head_dim)
                        *reinterpret_cast<float2*>(a.part + at * a.head_dim + column) =
                            make_float2(o[n][2 * r], o[n][2 * r + 1]);
                }
                if (t == 0) a.state[at] = make_float2(m[r], l[r]);
            }
        }
        __syncthreads();  // the next split loads into the ring
    }
}

template <int Width>
void launch_as(const GemmLaunch& l, const BlockAttentionArgs& args) {
    const int tiles = args.rows.count * head_tiles(args.heads, args.kv_heads);
    const int groups = (tiles + kWarps - 1) / kWarps;
    const int splits = std::clamp(kBlocksWanted / (args.kv_heads * groups), 1, args.parts);
    launch<block_attend<Width>>({l.stream, l.device, l.name,
                                 dim3(static_cast<unsigned>(splits), static_cast<unsigned>(args.kv_heads),
                                      static_cast<unsigned>(groups)),
                                 kThreads, kStages * stage_bytes(Width)},
                                args);
}

}  // namespace

void launch_block_attend_bf16(const GemmLaunch& l, const BlockAttentionArgs& args) {
    if (args.head_dim <= 64)
        launch_as<64>(l, args);
    else
        launch_as<128>(l, args);
}

}  // namespace kdt::cuda
