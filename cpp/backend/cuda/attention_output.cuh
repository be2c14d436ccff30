// Output warps of attention_bf16.cu: they bring K, and add P . V.
#pragma once

#include "backend/cuda/attention_bf16.cuh"

namespace kdt::cuda::bf16_attention {

// K: an output warp brings eight keys of each step. Lane l has key l / 4 and of each four units one.

template <class Shape, int MT>
struct Loader {
    static constexpr int kKeys = kStepKeys / kOutputWarps, kLanes = 32 / kKeys;

    const AttentionArgs& a;
    const Part& part;
    Shared<MT>& sm;
    const int32_t *const table, *const ancestors;  // pages and scratch rows of the row's keys
    const int key, unit;
    int place;  // page or scratch row of the step to come, -1 for none: looked up one step ahead

    __device__ __forceinline__ Loader(const AttentionArgs& args, const Part& p, Shared<MT>& shared, int warp,
                                      int lane)
        : a(args),
          part(p),
          sm(shared),
          table(a.cache.page_table +
                static_cast<long long>(a.batch.sequence[p.row]) * a.cache.pages_per_sequence),
          ancestors(a.batch.ancestors + static_cast<long long>(p.row) * kMaxAncestors),
          key(warp * kKeys + lane / kLanes),
          unit(lane % kLanes) {}

    __device__ __forceinline__ void begin() {
        look_up(0);
        for (int i = 0; i < kFirstStages; ++i) load(i);
    }

    __device__ __forceinline__ int position(int i) const { return (part.step + i) * kStepKeys + key; }

    __device__ __forceinline__ void look_up(int i) {
        const int p = position(i), behind = p - part.span.prefix;
        place = -1;
        if (behind < 0 ? p / kPageSize < a.cache.pages_per_sequence : behind < part.span.ancestors)
            place = behind < 0 ? table[p / kPageSize] : ancestors[behind];
    }

    // Requests step i, whose place is free; keys past the end are zeros.
    __device__ __forceinline__ void load(int i) {
        if (i >= part.steps) return;
        const int p = position(i), row_bytes = Shape::width(a) * 2;
        const bool committed = p < part.span.prefix;
        const bool found = place >= 0 && (!committed || place < a.cache.page_count);
        const auto* from = static_cast<const unsigned char*>(committed ? a.cache.pages : a.cache.scratch);
        if (found)
            from += static_cast<long long>(committed ? place * kPageSize + p % kPageSize : place) * row_bytes;
        look_up(i + 1);
        const int stage = i % kStages;
        const uint32_t to = ptx::shared_address(sm.keys[stage]) + key * kKeyBytes + unit_at(unit, key);
        if (found)
            copy<true>(to, from);
        else
            copy<false>(to, from);
        ptx::copy_async_arrive(ptx::shared_address(&sm.loaded[stage]));
    }

    template <bool Found>
    __device__ __forceinline__ void copy(uint32_t to, const unsigned char* from) const {
        const Columns c = Shape::columns(a, part.rank);
        const unsigned char* const latents = from + (c.first_latent + unit) * 16;
        const unsigned char* const ropes =
            from + (Shape::latent(a) / 8 + c.first_rope - c.latents + unit) * 16;
#pragma unroll
        for (int j = 0; j < kMostUnits; j += kLanes) {
            if (j + unit >= c.units()) break;
            const unsigned char* const at = (j + unit < c.latents ? latents : ropes) + j * 16;
            if (Found)
                ptx::copy_async_16(to + j * 16, at);
            else
                ptx::copy_async_16(to + j * 16, from, false);
        }
    }
};

template <int MT>
struct Output {
    float o[MT][kOutputTiles][4];

    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int m = 0; m < MT; ++m)
            for (int n = 0; n < kOutputTiles; ++n)
                for (int i = 0; i < 4; ++i) o[m][n][i] = 0.0f;
    }

    __device__ __forceinline__ void rescale(const float* factor, uint32_t wanted, int lane) {
        if (wanted == 0) return;
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            if ((wanted >> m * 8 & 0xFF) == 0) continue;
            const float f[2] = {factor[m * 16 + lane / 4], factor[m * 16 + lane / 4 + 8]};
#pragma unroll
            for (int n = 0; n < kOutputTiles; ++n)
                for (int i = 0; i < 4; ++i) o[m][n][i] *= f[i / 2];
        }
    }

    // o += P . V over 16 keys, of which `p` holds P; V is the same bytes as K, read transposed.
    __device__ __forceinline__ void add(const uint4 (&p)[MT], uint32_t keys_at, int tiles, int lane) {
        const int key = lane / 8 % 2 * 8 + lane % 8;
        const uint32_t at = keys_at + key * kKeyBytes;
        const uint32_t unit[2] = {at + unit_at(lane / 16, key), at + unit_at(2 + lane / 16, key)};
        uint32_t v[2][4];
        const auto read = [&](int n) {
            if (n < tiles) ptx::ldmatrix_x4_transposed(v[n / 2 % 2], unit[n / 2 % 2] + n / 4 * 64);
        };
        read(0);
#pragma unroll
        for (int n = 0; n < kOutputTiles; n += 2) {
            if (n >= tiles) break;
            if (n + 2 < kOutputTiles) read(n + 2);
            const uint32_t (&b)[4] = v[n / 2 % 2];
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                ptx::mma_bf16(o[m][n], p[m].x, p[m].y, p[m].z, p[m].w, b[0], b[1]);
                ptx::mma_bf16(o[m][n + 1], p[m].x, p[m].y, p[m].z, p[m].w, b[2], b[3]);
            }
        }
    }

    // `part` points at the first head's and the warp's first column.
    __device__ __forceinline__ void store(float* part, long long head_stride, int heads, int tiles,
                                          int lane) const {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int head = m * 16 + lane / 4 + r * 8;
                if (head >= heads) continue;
#pragma unroll
                for (int n = 0; n < kOutputTiles; ++n)
                    if (n < tiles)
                        *reinterpret_cast<float2*>(part + head * head_stride + n * 8 + lane % 4 * 2) =
                            make_float2(o[m][n][2 * r], o[m][n][2 * r + 1]);
            }
    }
};

template <class Shape, int MT>
__device__ __forceinline__ void output(const AttentionArgs& a, const Part& part, Shared<MT>& sm,
                                       Loader<Shape, MT>& loader, int warp, int lane) {
    const Columns c = Shape::columns(a, part.rank);
    const int first_unit = warp * kOutputTiles, latent = Shape::latent(a);
    const int tiles = Shape::kWhole ? kOutputTiles : c.latents - first_unit;
    const long long head_stride = static_cast<long long>(a.parts) * latent;
    float* const to = a.part + (static_cast<long long>(blockIdx.z) * a.heads + part.head0) * head_stride +
                      (c.first_latent + first_unit) * 8;
    ptx::cluster_sync();
    for (int i = kFirstStages; i < kStages; ++i) loader.load(i);
    Output<MT> o;
    o.restart();
    int split = part.split, end = part.split_end(split);
    for (int i = 0; i < part.steps; ++i) {
        const int set = i % kSets;
        const uint32_t keys_at = ptx::shared_address(sm.keys[i % kStages]) + first_unit * 16;
        wait(sm.weighed[set], i / kSets);
        if (i > 0) {
            wait(sm.used[set ^ 1], (i - 1) / kSets);
            loader.load(i - 1 + kStages);
        }
        uint4 p[MT];
#pragma unroll
        for (int m = 0; m < MT; ++m) p[m] = sm.weight[set][m][0][lane];
        o.rescale(sm.factor[set], *reinterpret_cast<const uint32_t*>(sm.rescale[set]), lane);
        o.add(p, keys_at, tiles, lane);
#pragma unroll
        for (int m = 0; m < MT; ++m) p[m] = sm.weight[set][m][1][lane];
        o.add(p, keys_at + 16 * kKeyBytes, tiles, lane);
        arrive(sm.used[set]);
        if (i + 1 == end) {
            o.store(to + static_cast<long long>(split) * latent, head_stride, a.heads - part.head0, tiles,
                    lane);
            o.restart();
            end = part.split_end(++split);
        }
    }
}

}  // namespace kdt::cuda::bf16_attention
