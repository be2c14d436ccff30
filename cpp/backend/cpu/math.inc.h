// exp, log and the Philox generator on sixteen lanes: the same sequence of operations for every instruction
// set.

// e^x, at most 1 ulp from the true value; exp(-inf) = 0, overflow to +inf, NaN stays.
KDT_INLINE F16 exp(F16 x) {
    x = max(set1(-104.0f), x);            // below, the result is 0; these two keep a NaN
    x = min(set1(89.0f), x);              // above, it is +inf
    const F16 magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const F16 shifted = fma(x, set1(1.44269502f), magic);
    const F16 n = sub(shifted, magic);
    F16 r = fma(n, set1(-0.693359375f), x);
    r = fma(n, set1(0.000212194442f), r);
    F16 q = set1(0.000197901347f);  // (e^r - 1 - r) / r^2 on |r| <= log(2) / 2
    q = fma(q, r, set1(0.00139448687f));
    q = fma(q, r, set1(0.00833349861f));
    q = fma(q, r, set1(0.0416662917f));
    q = fma(q, r, set1(0.166666657f));
    q = fma(q, r, set1(0.5f));
    const F16 p = add(fma(mul(r, r), q, r), set1(1.0f));
    // times 2^n in two steps, so that the result may be subnormal or overflow
    const I16 e = isub(to_bits(shifted), to_bits(magic));
    const I16 e1 = sra<1>(e);
    const I16 e2 = isub(e, e1);
    const I16 bias = iset1(127);
    return mul(mul(p, from_bits(shl<23>(iadd(e1, bias)))), from_bits(shl<23>(iadd(e2, bias))));
}

// Natural logarithm, at most 1 ulp from the true value; log(0) = -inf, of negative values NaN.
KDT_INLINE F16 log(F16 x) {
    const F16 infinity = from_bits(iset1(0x7F800000u));
    const M16 small = lt(x, from_bits(iset1(0x00800000u)));  // subnormal
    const I16 bits = to_bits(select(small, mul(x, set1(8388608.0f)), x));
    // x = 2^e * (1 + f), 1 + f in [sqrt(1/2), sqrt(2))
    const I16 root = iset1(0x3F3504F3u);
    const I16 offset = isub(bits, root);
    F16 e = from_int(sra<23>(offset));
    e = select(small, sub(e, set1(23.0f)), e);
    const F16 f = sub(from_bits(iadd(iand(offset, iset1(0x007FFFFFu)), root)), set1(1.0f));
    F16 q = set1(0.0674773082f);  // (log(1 + f) - f + f^2 / 2) / f^3
    q = fma(q, f, set1(-0.116775155f));
    q = fma(q, f, set1(0.11888697f));
    q = fma(q, f, set1(-0.124053404f));
    q = fma(q, f, set1(0.142194524f));
    q = fma(q, f, set1(-0.166680053f));
    q = fma(q, f, set1(0.200021237f));
    q = fma(q, f, set1(-0.250000089f));
    q = fma(q, f, set1(0.333333135f));
    const F16 ff = mul(f, f);
    F16 tail = mul(mul(ff, f), q);
    tail = fma(e, set1(-0.000212194442f), tail);
    tail = fma(set1(-0.5f), ff, tail);
    F16 y = fma(e, set1(0.693359375f), add(f, tail));
    y = select(lt(x, infinity), y, x);  // +inf and NaN
    y = select(eq(x, zero()), from_bits(iset1(0xFF800000u)), y);
    return select(lt(x, zero()), from_bits(iset1(0x7FC00000u)), y);
}

// Philox4x32-10 (Salmon et al., SC 2011).
struct Counter {
    I16 c0, c1, c2, c3;
};
KDT_INLINE Counter philox10(Counter c, uint32_t k0, uint32_t k1) {
    for (int round = 0; round < 10; ++round) {
        I16 high0, low0, high1, low1;
        mul_wide(c.c0, 0xD2511F53u, high0, low0);
        mul_wide(c.c2, 0xCD9E8D57u, high1, low1);
        c = Counter{ixor(ixor(high1, c.c1), iset1(k0)), low1, ixor(ixor(high0, c.c3), iset1(k1)), low0};
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

// Standard Gumbel noise of a random word. v in (0, 1) is the word as a float, so that its small values are as
// fine as floats are: they are the large values of the noise, which decide. -log(1 - v) is exponential.
KDT_INLINE F16 gumbel(I16 word) {
    const F16 high = from_int(shr<16>(word));
    const F16 low = from_int(iand(word, iset1(0xFFFFu)));
    const F16 value = fma(high, set1(65536.0f), low);  // the word, rounded once
    const F16 v = min(mul(add(value, set1(0.5f)), set1(0x1p-32f)), set1(1.0f - 0x1p-24f));
    const F16 series = fma(mul(v, v), set1(0.5f), v);
    const F16 exact = sub(zero(), log(sub(set1(1.0f), v)));
    const F16 exponential = select(lt(v, set1(0x1p-12f)), series, exact);
    return sub(zero(), log(exponential));
}
