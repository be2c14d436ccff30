// Element-wise kernels, and passes over rows of logits.

// Calls f(first index, lanes) for each vector of n values.
template <class Function>
KDT_INLINE void each_vector(int n, Function f) {
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
    if (i < n) f(i, n - i);
}
KDT_INLINE F16 load_some(const float* p, int n) {
    return n == kLanes ? load(p) : load_n(p, n);
}
KDT_INLINE void store_some(float* p, F16 a, int n) {
    if (n == kLanes)
        store(p, a);
    else
        store_n(p, a, n);
}

float sum_of_squares(const float* x, int n) {
    F16 acc = zero();
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 v = load_some(x + i, m);
        acc = fma(v, v, acc);
    });
    return lane_sum(acc);
}

void scale_by(const float* x, float r, const float* weight, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        store_some(y + i, mul(mul(load_some(x + i, m), set1(r)), load_some(weight + i, m)), m);
    });
}

// 1 + e^-x, the denominator of sigmoid and silu.
KDT_INLINE F16 one_plus_exp_minus(F16 x) {
    return add(set1(1.0f), exp(sub(zero(), x)));
}

void silu_mul(const float* gate, const float* up, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 g = load_some(gate + i, m);
        store_some(y + i, mul(div(g, one_plus_exp_minus(g)), load_some(up + i, m)), m);
    });
}

void sigmoid(float* x, int n) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        store_some(x + i, div(set1(1.0f), one_plus_exp_minus(load_some(x + i, m))), m);
    });
}

void scale_to(float a, float* y, int n) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        store_some(y + i, fma(set1(a), load_some(y + i, m), zero()), m);
    });
}

void axpy(float a, const float* x, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        store_some(y + i, fma(set1(a), load_some(x + i, m), load_some(y + i, m)), m);
    });
}

void add_to(const float* x, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        store_some(y + i, add(load_some(y + i, m), load_some(x + i, m)), m);
    });
}

void shift_divide(const float* x, float top, float by, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 v = load_some(x + i, m);
        const F16 z = div(sub(v, set1(top)), set1(by));
        store_some(y + i, select(eq(v, set1(top)), zero(), z), m);  // also where top is +inf
    });
}

float sum_lanes(const float* lanes) {
    return lane_sum(load(lanes));
}

void exp_each(const float* x, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA { store_some(y + i, exp(load_some(x + i, m)), m); });
}

void log_each(const float* x, int n, float* y) {
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA { store_some(y + i, log(load_some(x + i, m)), m); });
}

Scan scan(const float* x, int n) {
    const F16 lowest = set1(-__builtin_inff());
    F16 best = lowest;
    I16 best_index = iset1(~0u);
    I16 index = lane_index();
    M16 nan = lt(lowest, lowest);
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 v = m == kLanes ? load(x + i) : select(first_lanes(m), load_n(x + i, m), lowest);
        nan = either(nan, is_nan(v));
        const M16 better = lt(best, v);
        best = select(better, v, best);
        best_index = select(better, index, best_index);
        index = iadd(index, iset1(kLanes));
    });
    float value[kLanes];
    uint32_t at[kLanes];
    store(value, best);
    istore(at, best_index);
    Scan result{-__builtin_inff(), -1, lane_bits(nan) != 0};
    for (int l = 0; l < kLanes; ++l) {
        const int candidate = static_cast<int>(at[l]);
        if (candidate < 0) continue;
        if (value[l] > result.max || (value[l] == result.max && candidate < result.argmax)) {
            result.max = value[l];
            result.argmax = candidate;
        }
    }
    return result;
}

float exp_sum(const float* x, float top, int n, float* p) {
    F16 acc = zero();
    each_vector(n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 v = load_some(x + i, m);
        F16 e = exp(sub(v, set1(top)));
        e = select(eq(v, set1(top)), set1(1.0f), e);  // also where top is +inf
        if (m < kLanes) e = select(first_lanes(m), e, zero());
        if (p != nullptr) store_some(p + i, e, m);
        acc = add(acc, e);
    });
    return lane_sum(acc);
}

int find_at_least(const float* x, int begin, int n, float threshold, int capacity, int32_t* index,
                  int* next) {
    int count = 0;
    int i = begin;
    for (; i < n; i += kLanes) {
        if (count + kLanes > capacity) break;
        const int m = n - i < kLanes ? n - i : kLanes;
        uint32_t bits = lane_bits(ge(load_some(x + i, m), set1(threshold)));
        if (m < kLanes) bits &= (1u << m) - 1u;
        for (; bits != 0; bits &= bits - 1) index[count++] = i + __builtin_ctz(bits);
    }
    *next = i < n ? i : n;
    return count;
}

KDT_INLINE F16 gumbel_of(const GumbelJob& job, I16 id) {
    const Counter c =
        philox10({id, iset1(job.position), iset1(job.choice), iset1(0)}, job.key[0], job.key[1]);
    return gumbel(c.c0);
}
KDT_INLINE I16 ids_at(const GumbelJob& job, int i, int m) {
    return job.id != nullptr ? iload_n(job.id + i, m) : iadd(lane_index(), iset1(static_cast<uint32_t>(i)));
}

int32_t gumbel_argmax(const GumbelJob& job) {
    F16 best = set1(-__builtin_inff());
    I16 best_id = iset1(0x7FFFFFFFu);
    each_vector(job.n, [&](int i, int m) KDT_INLINE_LAMBDA {
        const F16 z = load_some(job.z + i, m);
        const I16 id = ids_at(job, i, m);
        const F16 v = add(z, gumbel_of(job, id));
        M16 better = either(lt(best, v), both(eq(best, v), ilt(id, best_id)));
        if (job.min_p > 0.0f) {
            better = both(better, ge(exp(z), set1(job.min_p)));
        }
        if (m < kLanes) better = both(better, first_lanes(m));
        best = select(better, v, best);
        best_id = select(better, id, best_id);
    });
    float value[kLanes];
    uint32_t id[kLanes];
    store(value, best);
    istore(id, best_id);
    int winner = 0;
    for (int l = 1; l < kLanes; ++l)
        if (value[l] > value[winner] || (value[l] == value[winner] && id[l] < id[winner])) winner = l;
    return id[winner] == 0x7FFFFFFFu ? -1 : static_cast<int32_t>(id[winner]);
}

void gumbel_each(const GumbelJob& job, float* out) {
    each_vector(job.n, [&](int i, int m)
                           KDT_INLINE_LAMBDA { store_some(out + i, gumbel_of(job, ids_at(job, i, m)), m); });
}

void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    const Counter c = philox10({iset1(counter[0]), iset1(counter[1]), iset1(counter[2]), iset1(counter[3])},
                               key[0], key[1]);
    uint32_t lanes[kLanes];
    istore(lanes, c.c0);
    out[0] = lanes[0];
    istore(lanes, c.c1);
    out[1] = lanes[0];
    istore(lanes, c.c2);
    out[2] = lanes[0];
    istore(lanes, c.c3);
    out[3] = lanes[0];
}

float stream_sum(const float* x, size_t n) {
    F16 acc[8];
    KDT_UNROLL
    for (int i = 0; i < 8; ++i) acc[i] = zero();
    for (size_t k = 0; k + 8 * kLanes <= n; k += 8 * kLanes) {
        KDT_UNROLL
        for (int i = 0; i < 8; ++i) acc[i] = add(acc[i], load(x + k + i * kLanes));
    }
    float total = 0.0f;
    for (int i = 0; i < 8; ++i) total += lane_sum(acc[i]);
    return total;
}
