// Dot products of rows with packed matrices. Each (row, output) pair has one accumulator of sixteen lanes
// that walks the inputs in ascending order; everything else here (tiles, groups, depth) is about memory and
// does not reach the bits.

struct F32Format {
    static constexpr int kSteps = 1;
    static constexpr int kScaleBytes = 0;  // per unit and output
    F16 words;
    KDT_INLINE void read(const uint8_t* data, const uint8_t*) {
        words = load(reinterpret_cast<const float*>(data));
    }
    template <int J>
    KDT_INLINE F16 weight() {
        return words;
    }
};

struct Bf16Format {
    static constexpr int kSteps = 2;
    static constexpr int kScaleBytes = 0;
    I16 words;
    KDT_INLINE void read(const uint8_t* data, const uint8_t*) { words = iload(data); }
    template <int J>
    KDT_INLINE F16 weight() {
        if constexpr (J == 0) return from_bits(shl<16>(words));
        return from_bits(iand(words, iset1(0xFFFF0000u)));
    }
};

template <bool kBf16Scales>
struct W4Format {
    static constexpr int kSteps = 8;
    static constexpr int kScaleBytes = kBf16Scales ? 8 : 16;
    I16 words;
    const uint8_t* scales;
    NibbleTable table;
    KDT_INLINE void read(const uint8_t* data, const uint8_t* unit_scales) {
        words = iload(data);
        scales = unit_scales;
    }
    template <int J>
    KDT_INLINE F16 weight() {
        if constexpr (J % 2 == 0) table = nibble_table(scale<J / 2>());  // a scale serves 32 inputs
        return unpack_nibble<J>(words, table);
    }
    template <int G>
    KDT_INLINE F16 scale() {  // of group G
        uint32_t bits;
        if constexpr (!kBf16Scales) {
            __builtin_memcpy(&bits, scales + 4 * G, 4);
            return from_bits(iset1(bits));
        }
        __builtin_memcpy(&bits, scales + 4 * (G / 2), 4);  // two of them, the even one in the low half
        if constexpr (G % 2 == 0) return from_bits(shl<16>(iset1(bits)));
        return from_bits(iand(iset1(bits), iset1(0xFFFF0000u)));
    }
};

// How far ahead of its use memory is asked for, in bytes of weights. The processor's own prefetching stops at
// every 4 KiB page, and one row's arithmetic is too short to hide what is behind it.
constexpr ptrdiff_t kPrefetch = 8192;
// With several tiles the next group is asked for while this one is computed with, where both fit into the L2
// cache.
constexpr ptrdiff_t kLargestGroupAhead = 256 << 10;

struct TileArgs {
    const float* const* x;  // rows of the tile
    int depth;              // inputs
    const uint8_t* data;    // of the block
    const uint8_t* scales;
    float* out;
    ptrdiff_t stride;
    const uint8_t* ahead;  // weights to ask for at the first unit
    const uint8_t* scales_ahead;
    ptrdiff_t ahead_step, scales_step;  // bytes further per unit
};

template <class F, int R, int O, int J>
KDT_INLINE void full_steps(F16 (&acc)[R][O], F (&unit)[O], const float* const (&x)[R], ptrdiff_t k) {
    F16 w[O];
    KDT_UNROLL
    for (int o = 0; o < O; ++o) w[o] = unit[o].template weight<J>();
    KDT_UNROLL
    for (int r = 0; r < R; ++r) {
        const F16 xr = load(x[r] + k + kLanes * J);
        KDT_UNROLL
        for (int o = 0; o < O; ++o) acc[r][o] = fma(xr, w[o], acc[r][o]);
    }
    if constexpr (J + 1 < F::kSteps) full_steps<F, R, O, J + 1>(acc, unit, x, k);
}

template <class F, int R, int O, int J>
KDT_INLINE void tail_steps(F16 (&acc)[R][O], F (&unit)[O], const float* const (&x)[R], ptrdiff_t k,
                           int left) {
    if (left <= kLanes * J) return;
    const int n = left - kLanes * J < kLanes ? left - kLanes * J : kLanes;
    F16 w[O];
    KDT_UNROLL
    for (int o = 0; o < O; ++o) w[o] = unit[o].template weight<J>();
    KDT_UNROLL
    for (int r = 0; r < R; ++r) {
        const F16 xr = load_n(x[r] + k + kLanes * J, n);
        KDT_UNROLL
        for (int o = 0; o < O; ++o) acc[r][o] = fma(xr, w[o], acc[r][o]);
    }
    if constexpr (J + 1 < F::kSteps) tail_steps<F, R, O, J + 1>(acc, unit, x, k, left);
}

// Outputs First .. First + O of a block for R rows.
template <class F, int R, int O, int First>
KDT_INLINE void dot_tile(const TileArgs& t) {
    const float* x[R];
    F16 acc[R][O];
    KDT_UNROLL
    for (int r = 0; r < R; ++r) {
        x[r] = t.x[r];
        KDT_UNROLL
        for (int o = 0; o < O; ++o) acc[r][o] = zero();
    }
    constexpr int kUnit = kLanes * F::kSteps;
    const uint8_t* data = t.data;
    const uint8_t* scales = t.scales;
    const uint8_t* ahead = t.ahead;
    const uint8_t* scales_ahead = t.scales_ahead;
    ptrdiff_t k = 0;
    F unit[O];
    for (; k + kUnit <= t.depth; k += kUnit) {
        if constexpr (First == 0) {
            KDT_UNROLL
            for (int o = 0; o < kBlockOutputs; ++o) __builtin_prefetch(ahead + o * 64);
            ahead += t.ahead_step;
            if constexpr (F::kScaleBytes > 0) {
                __builtin_prefetch(scales_ahead);
                scales_ahead += t.scales_step;
            }
        }
        KDT_UNROLL
        for (int o = 0; o < O; ++o)
            unit[o].read(data + (First + o) * 64, scales + (First + o) * F::kScaleBytes);
        full_steps<F, R, O, 0>(acc, unit, x, k);
        data += kBlockOutputs * 64;
        scales += kBlockOutputs * F::kScaleBytes;
    }
    if (k < t.depth) {
        KDT_UNROLL
        for (int o = 0; o < O; ++o)
            unit[o].read(data + (First + o) * 64, scales + (First + o) * F::kScaleBytes);
        tail_steps<F, R, O, 0>(acc, unit, x, k, static_cast<int>(t.depth - k));
    }
    KDT_UNROLL
    for (int r = 0; r < R; ++r) {
        float* const out = t.out + r * t.stride + First;
        if constexpr (O == 4) {
            lane_sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], out);
        } else {
            KDT_UNROLL
            for (int o = 0; o < O; ++o) out[o] = lane_sum(acc[r][o]);
        }
    }
}

template <class F, int R>
KDT_NOINLINE void dot_block(const TileArgs& t) {
    if constexpr (R == 1 || R * kBlockOutputs <= kTileCells) {
        dot_tile<F, R, 4, 0>(t);
    } else {
        dot_tile<F, R, 2, 0>(t);
        dot_tile<F, R, 2, 2>(t);
    }
}

template <class F, int R>
KDT_INLINE void dot_block_rows(const TileArgs& t, int rows) {
    if constexpr (R == 1) {
        dot_block<F, 1>(t);
    } else {
        if (rows == R) return dot_block<F, R>(t);
        dot_block_rows<F, R - 1>(t, rows);
    }
}

template <class F>
KDT_NOINLINE void dots_of(const DotJob& job) {
    constexpr int kUnit = kLanes * F::kSteps;
    constexpr int kRows = F::kSteps == 1 ? kTileRows : kTileRowsPacked;
    const ptrdiff_t units = (job.w.in + kUnit - 1) / kUnit;
    const int tiles = (job.rows + kRows - 1) / kRows;
    constexpr ptrdiff_t kUnitBytes = kBlockOutputs * 64, kUnitScaleBytes = kBlockOutputs * F::kScaleBytes;
    const ptrdiff_t block_bytes = units * kUnitBytes, block_scale_bytes = units * kUnitScaleBytes;
    const bool next_group = tiles > 1 && kGroupBlocks * block_bytes <= kLargestGroupAhead;
    // A group of blocks goes through all rows before the next one: weights come from memory once, and a
    // tile's rows once for the group.
    for (int group = job.block_begin; group < job.block_end; group += kGroupBlocks) {
        const int end = group + kGroupBlocks < job.block_end ? group + kGroupBlocks : job.block_end;
        for (int tile = 0; tile < tiles; ++tile) {
            const int row = job.rows * tile / tiles;
            const int rows = job.rows * (tile + 1) / tiles - row;
            for (int block = group; block < end; ++block) {
                TileArgs t;
                t.x = job.x + row;
                t.depth = job.w.in;
                t.data = job.w.data + block * block_bytes;
                t.scales = job.w.scales + block * block_scale_bytes;
                if (next_group) {  // each tile asks for its part of the block that comes in this one's place
                    t.ahead = t.data + kGroupBlocks * block_bytes + tile * (block_bytes / tiles);
                    t.scales_ahead =
                        t.scales + kGroupBlocks * block_scale_bytes + tile * (block_scale_bytes / tiles);
                    t.ahead_step = kUnitBytes / tiles;
                    t.scales_step = kUnitScaleBytes / tiles;
                } else {
                    t.ahead = t.data + kPrefetch;
                    t.scales_ahead = t.scales + kPrefetch * F::kScaleBytes / 64;
                    t.ahead_step = kUnitBytes;
                    t.scales_step = kUnitScaleBytes;
                }
                t.out = job.out + row * job.stride + (block - job.block_begin) * kBlockOutputs;
                t.stride = job.stride;
                dot_block_rows<F, kRows>(t, rows);
            }
        }
    }
}

void dots(const DotJob& job) {
    switch (job.w.format) {
        case Format::f32:
            return dots_of<F32Format>(job);
        case Format::bf16:
            return dots_of<Bf16Format>(job);
        case Format::w4_f32:
            return dots_of<W4Format<false>>(job);
        case Format::w4_bf16:
            return dots_of<W4Format<true>>(job);
    }
}

// A row of an f32 or bf16 matrix, widened: the embedding.
void widen_row(const PackedMatrix& w, int row, float* y) {
    const int block = row / kBlockOutputs;
    const int lane_set = row % kBlockOutputs;
    const int unit_inputs = w.format == Format::f32 ? kLanes : 2 * kLanes;
    const ptrdiff_t units = (w.in + unit_inputs - 1) / unit_inputs;
    const uint8_t* data = w.data + block * units * kBlockOutputs * 64 + lane_set * 64;
    for (ptrdiff_t u = 0; u < units; ++u, data += kBlockOutputs * 64) {
        const int k = static_cast<int>(u) * unit_inputs;
        const int left = w.in - k;
        if (w.format == Format::f32) {
            store_n(y + k, load(reinterpret_cast<const float*>(data)), left < kLanes ? left : kLanes);
        } else {
            Bf16Format unit;
            unit.read(data, nullptr);
            store_n(y + k, unit.weight<0>(), left < kLanes ? left : kLanes);
            if (left > kLanes)
                store_n(y + k + kLanes, unit.weight<1>(), left < 2 * kLanes ? left - kLanes : kLanes);
        }
    }
}
