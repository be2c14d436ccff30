// One softmax step of attention: the one function of (query, ordered keys) that serves prompt rows, plain
// decoding and tree nodes, wherever the keys lie. Tiles over queries, keys and value columns do not reach the
// bits.

template <int Q, int K>
KDT_INLINE void score_tile(const float* const* q, const float* const* key, int width, float scale, float* s) {
    F16 acc[Q][K];
    KDT_UNROLL
    for (int i = 0; i < Q; ++i) {
        KDT_UNROLL
        for (int j = 0; j < K; ++j) acc[i][j] = zero();
    }
    int k = 0;
    for (; k + kLanes <= width; k += kLanes) {
        F16 kv[K];
        KDT_UNROLL
        for (int j = 0; j < K; ++j) kv[j] = load(key[j] + k);
        KDT_UNROLL
        for (int i = 0; i < Q; ++i) {
            const F16 qv = load(q[i] + k);
            KDT_UNROLL
            for (int j = 0; j < K; ++j) acc[i][j] = fma(qv, kv[j], acc[i][j]);
        }
    }
    if (k < width) {
        F16 kv[K];
        KDT_UNROLL
        for (int j = 0; j < K; ++j) kv[j] = load_n(key[j] + k, width - k);
        KDT_UNROLL
        for (int i = 0; i < Q; ++i) {
            const F16 qv = load_n(q[i] + k, width - k);
            KDT_UNROLL
            for (int j = 0; j < K; ++j) acc[i][j] = fma(qv, kv[j], acc[i][j]);
        }
    }
    KDT_UNROLL
    for (int i = 0; i < Q; ++i) {
        if constexpr (K == 4) {
            float sums[4];
            lane_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3], sums);
            for (int j = 0; j < 4; ++j) s[i * kChunkSize + j] = sums[j] * scale;
        } else {
            KDT_UNROLL
            for (int j = 0; j < K; ++j) s[i * kChunkSize + j] = lane_sum(acc[i][j]) * scale;
        }
    }
}

template <int Q>
KDT_NOINLINE void scores_of(const AttendJob& job, int i, float* s) {
    constexpr int K = kTileCells >= 16 ? 4 : 2;
    const int width = job.key_width;
    int j = 0;
    for (; j + K <= job.count; j += K) score_tile<Q, K>(job.q + i, job.key + j, width, job.scale, s + j);
    for (; j < job.count; ++j) score_tile<Q, 1>(job.q + i, job.key + j, width, job.scale, s + j);
}

// o = o * a, then fma(p_j, value_j, o) in ascending j, on C vectors of columns from c on; `n` columns in the
// last.
template <int Q, int C>
KDT_INLINE void value_tile(const AttendJob& job, int i, int c, int n, const float* p, const float* a) {
    F16 acc[Q][C];
    KDT_UNROLL
    for (int r = 0; r < Q; ++r) {
        KDT_UNROLL
        for (int v = 0; v < C; ++v) {
            float* const o = job.o[i + r] + c + v * kLanes;
            acc[r][v] = job.first ? zero() : mul(n == kLanes ? load(o) : load_n(o, n), set1(a[i + r]));
        }
    }
    for (int j = 0; j < job.count; ++j) {
        F16 kv[C];
        KDT_UNROLL
        for (int v = 0; v < C; ++v) {
            const float* const value = job.value[j] + c + v * kLanes;
            kv[v] = n == kLanes ? load(value) : load_n(value, n);
        }
        KDT_UNROLL
        for (int r = 0; r < Q; ++r) {
            const F16 pr = set1(p[r * kChunkSize + j]);
            KDT_UNROLL
            for (int v = 0; v < C; ++v) acc[r][v] = fma(pr, kv[v], acc[r][v]);
        }
    }
    KDT_UNROLL
    for (int r = 0; r < Q; ++r) {
        KDT_UNROLL
        for (int v = 0; v < C; ++v) store_n(job.o[i + r] + c + v * kLanes, acc[r][v], n);
    }
}

template <int Q>
KDT_NOINLINE void values_of(const AttendJob& job, int i, const float* p, const float* a) {
    constexpr int C = kTileCells >= 16 ? 4 : 2;
    int c = 0;
    for (; c + C * kLanes <= job.value_width; c += C * kLanes) value_tile<Q, C>(job, i, c, kLanes, p, a);
    for (; c < job.value_width; c += kLanes)
        value_tile<Q, 1>(job, i, c, job.value_width - c < kLanes ? job.value_width - c : kLanes, p, a);
}

void attend(const AttendJob& job) {
    constexpr int Q = kTileCells >= 16 ? 4 : 2;
    float s[kMaxQueries * kChunkSize];  // scores, then probabilities
    float a[kMaxQueries];
    int i = 0;
    for (; i + Q <= job.n; i += Q) scores_of<Q>(job, i, s + i * kChunkSize);
    for (; i < job.n; ++i) scores_of<1>(job, i, s + i * kChunkSize);

    float drop[kLanes];  // m - m' of up to sixteen queries
    for (int r = 0; r < kLanes; ++r) drop[r] = 0.0f;
    for (int r = 0; r < job.n; ++r) {
        float* const row = s + r * kChunkSize;
        float top = job.first ? -__builtin_inff() : job.m[r];
        for (int j = 0; j < job.count; ++j) top = row[j] > top ? row[j] : top;
        drop[r] = job.first ? -__builtin_inff() : job.m[r] - top;
        job.m[r] = top;
        for (int j = 0; j < job.count; j += kLanes) {
            const int n = job.count - j < kLanes ? job.count - j : kLanes;
            store_n(row + j, exp(sub(load_n(row + j, n), set1(top))), n);
        }
    }
    float factor[kLanes];
    store(factor, exp(load(drop)));
    for (int r = 0; r < job.n; ++r) a[r] = factor[r];

    float sum[kMaxQueries];
    for (int r = 0; r < job.n; ++r) sum[r] = 0.0f;
    for (int j = 0; j < job.count; ++j)
        for (int r = 0; r < job.n; ++r) sum[r] = sum[r] + s[r * kChunkSize + j];
    for (int r = 0; r < job.n; ++r) job.l[r] = job.first ? sum[r] : job.l[r] * a[r] + sum[r];

    i = 0;
    for (; i + Q <= job.n; i += Q) values_of<Q>(job, i, s + i * kChunkSize, a);
    for (; i < job.n; ++i) values_of<1>(job, i, s + i * kChunkSize, a);
}

void scale_rows(float* const* o, const float* l, int n, int latent) {
    for (int r = 0; r < n; ++r)
        for (int c = 0; c < latent; c += kLanes) {
            const int m = latent - c < kLanes ? latent - c : kLanes;
            store_n(o[r] + c, div(load_n(o[r] + c, m), set1(l[r])), m);
        }
}
