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

KDT_INLINE float widen_bf16(const uint8_t* p) {
    uint16_t half;
    __builtin_memcpy(&half, p, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
}

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
        if constexpr (J % 2 == 0) {  // a scale serves 32 inputs
            float scale;
            if constexpr (kBf16Scales)
                scale = widen_bf16(scales + J);
            else
                __builtin_memcpy(&scale, scales + 2 * J, 4);
            table = nibble_table(scale);
        }
        return unpack_nibble<J>(words, table);
    }
};

struct TileArgs {
    const float* const* x;  // rows of the tile
    ptrdiff_t begin;        // first input, a multiple of the unit
    int depth;              // inputs
    const uint8_t* data;    // of the block, at `begin`
    const uint8_t* scales;
    float* acc;  // [row, output, lane] of the block, rows acc_stride apart
    ptrdiff_t acc_stride;
    bool first, last;  // part of the inputs: start at zero; reduce to `out`
    float* out;
    ptrdiff_t out_stride;
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

template <class F, int R, int O>
KDT_INLINE void dot_tile(const TileArgs& t, int o0) {
    const float* x[R];
    F16 acc[R][O];
    KDT_UNROLL
    for (int r = 0; r < R; ++r) x[r] = t.x[r] + t.begin;
    KDT_UNROLL
    for (int r = 0; r < R; ++r) {
        KDT_UNROLL
        for (int o = 0; o < O; ++o)
            acc[r][o] = t.first ? zero() : load(t.acc + r * t.acc_stride + (o0 + o) * kLanes);
    }
    constexpr int kUnit = kLanes * F::kSteps;
    const uint8_t* data = t.data + o0 * 64;
    const uint8_t* scales = t.scales + o0 * F::kScaleBytes;
    ptrdiff_t k = 0;
    for (; k + kUnit <= t.depth; k += kUnit) {
        F unit[O];
        KDT_UNROLL
        for (int o = 0; o < O; ++o) unit[o].read(data + o * 64, scales + o * F::kScaleBytes);
        full_steps<F, R, O, 0>(acc, unit, x, k);
        data += kBlockOutputs * 64;
        scales += kBlockOutputs * F::kScaleBytes;
    }
    if (k < t.depth) {
        F unit[O];
        KDT_UNROLL
        for (int o = 0; o < O; ++o) unit[o].read(data + o * 64, scales + o * F::kScaleBytes);
        tail_steps<F, R, O, 0>(acc, unit, x, k, static_cast<int>(t.depth - k));
    }
    if (!t.last) {
        KDT_UNROLL
        for (int r = 0; r < R; ++r) {
            KDT_UNROLL
            for (int o = 0; o < O; ++o) store(t.acc + r * t.acc_stride + (o0 + o) * kLanes, acc[r][o]);
        }
    } else if constexpr (O == 4) {
        KDT_UNROLL
        for (int r = 0; r < R; ++r)
            lane_sum4(acc[r][0], acc[r][1], acc[r][2], acc[r][3], t.out + r * t.out_stride);
    } else {
        KDT_UNROLL
        for (int r = 0; r < R; ++r) {
            KDT_UNROLL
            for (int o = 0; o < O; ++o) t.out[r * t.out_stride + o0 + o] = lane_sum(acc[r][o]);
        }
    }
}

template <class F, int R>
KDT_NOINLINE void dot_block(const TileArgs& t) {
    if constexpr (R * kBlockOutputs <= kTileRows * kTileOutputs || R == 1) {
        dot_tile<F, R, 4>(t, 0);
    } else {
        dot_tile<F, R, 2>(t, 0);
        dot_tile<F, R, 2>(t, 2);
    }
}

template <class F, int R = kTileRows>
KDT_INLINE void dot_block_rows(const TileArgs& t, int rows) {
    if constexpr (R == 1) {
        dot_block<F, 1>(t);
    } else {
        if (rows == R) return dot_block<F, R>(t);
        dot_block_rows<F, R - 1>(t, rows);
    }
}

// Weights of one block at `depth` inputs as F32Format.
template <class F, int J>
KDT_INLINE void unpack_steps(F& unit, float* to, ptrdiff_t steps) {
    if (J >= steps) return;
    store(to + J * kBlockOutputs * kLanes, unit.template weight<J>());
    if constexpr (J + 1 < F::kSteps) unpack_steps<F, J + 1>(unit, to, steps);
}
template <class F>
KDT_NOINLINE void unpack_block(const uint8_t* data, const uint8_t* scales, int depth, float* to) {
    const ptrdiff_t steps = (depth + kLanes - 1) / kLanes;
    for (ptrdiff_t s = 0; s < steps; s += F::kSteps) {
        for (int o = 0; o < kBlockOutputs; ++o) {
            F unit;
            unit.read(data + o * 64, scales + o * F::kScaleBytes);
            unpack_steps<F, 0>(unit, to + (s * kBlockOutputs + o) * kLanes, steps - s);
        }
        data += kBlockOutputs * 64;
        scales += kBlockOutputs * F::kScaleBytes;
    }
}

template <class F>
KDT_NOINLINE void dots_of(const DotJob& job) {
    constexpr int kUnit = kLanes * F::kSteps;
    const ptrdiff_t units = (job.w.in + kUnit - 1) / kUnit;
    const ptrdiff_t block_bytes = units * kBlockOutputs * 64;
    const ptrdiff_t block_scale_bytes = units * kBlockOutputs * F::kScaleBytes;
    const int tiles = (job.rows + kTileRows - 1) / kTileRows;
    const bool unpack = F::kSteps > 1 && tiles > 1;
    // Few rows need few bytes of x per step: they run the whole depth in registers.
    const int tile_rows = (job.rows + tiles - 1) / tiles;
    const int chunk = unpack || tile_rows > 2 ? kSlabDepth : job.w.in;
    float* const acc = job.scratch;
    float* const slab =
        job.scratch + static_cast<size_t>(kMaxDotRows) * kGroupBlocks * kBlockOutputs * kLanes;
    constexpr ptrdiff_t kAccStride = kGroupBlocks * kBlockOutputs * kLanes;

    for (int group = job.block_begin; group < job.block_end; group += kGroupBlocks) {
        const int blocks = job.block_end - group < kGroupBlocks ? job.block_end - group : kGroupBlocks;
        for (int begin = 0; begin < job.w.in; begin += chunk) {
            const int depth = job.w.in - begin < chunk ? job.w.in - begin : chunk;
            const ptrdiff_t unit = begin / kUnit;
            if (unpack)
                for (int b = 0; b < blocks; ++b)
                    unpack_block<F>(job.w.data + (group + b) * block_bytes + unit * kBlockOutputs * 64,
                                    job.w.scales + (group + b) * block_scale_bytes +
                                        unit * kBlockOutputs * F::kScaleBytes,
                                    depth, slab + b * kBlockOutputs * kSlabDepth);
            for (int tile = 0; tile < tiles; ++tile) {
                const int row = job.rows * tile / tiles;
                const int rows = job.rows * (tile + 1) / tiles - row;
                for (int b = 0; b < blocks; ++b) {
                    TileArgs t;
                    t.x = job.x + row;
                    t.begin = begin;
                    t.depth = depth;
                    t.acc = acc + row * kAccStride + b * kBlockOutputs * kLanes;
                    t.acc_stride = kAccStride;
                    t.first = begin == 0;
                    t.last = begin + depth == job.w.in;
                    t.out = job.out + row * job.stride + (group - job.block_begin + b) * kBlockOutputs;
                    t.out_stride = job.stride;
                    if (unpack) {
                        t.data = reinterpret_cast<const uint8_t*>(slab + b * kBlockOutputs * kSlabDepth);
                        t.scales = nullptr;
                        dot_block_rows<F32Format>(t, rows);
                    } else {
                        t.data = job.w.data + (group + b) * block_bytes + unit * kBlockOutputs * 64;
                        t.scales = job.w.scales + (group + b) * block_scale_bytes +
                                   unit * kBlockOutputs * F::kScaleBytes;
                        dot_block_rows<F>(t, rows);
                    }
                }
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
