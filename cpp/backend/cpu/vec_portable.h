// Sixteen float lanes on plain arrays: the portable path. Included once, inside the instruction set's own
// namespace, by kernels_portable.cpp. The other two vec_*.h give the same operations, lane for lane and bit
// for bit.

#define KDT_FOR_LANES for (int i = 0; i < 16; ++i)

struct F16 {
    float v[16];
};
struct I16 {  // 32-bit lanes, as unsigned
    uint32_t v[16];
};
struct M16 {
    uint32_t v[16];  // 0 or ~0
};

// a * b + c rounded once. Without a fused instruction: the product is exact in double, and the sum is rounded
// to odd there (53 >= 2 * 24 + 2 bits), so that rounding to float afterwards is the only rounding that shows.
KDT_INLINE float fma1(float a, float b, float c) {
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    const double p = static_cast<double>(a) * static_cast<double>(b);
    const double d = static_cast<double>(c);
    const double s = p + d;
    const double t = s - p;
    const double e = (p - (s - t)) + (d - t);  // p + d = s + e exactly; NaN where s is not finite
    uint64_t bits;
    __builtin_memcpy(&bits, &s, 8);
    const uint64_t inexact = static_cast<uint64_t>(e < 0.0) | static_cast<uint64_t>(e > 0.0);
    const uint64_t toward_zero = static_cast<uint64_t>(e < 0.0) ^ static_cast<uint64_t>(s < 0.0);
    const uint64_t step = inexact & ~bits & 1u;
    bits += step - 2 * (step & toward_zero);
    double odd;
    __builtin_memcpy(&odd, &bits, 8);
    return static_cast<float>(odd);
#endif
}

KDT_INLINE F16 zero() {
    return F16{};
}
KDT_INLINE F16 set1(float x) {
    F16 r;
    KDT_FOR_LANES r.v[i] = x;
    return r;
}
KDT_INLINE F16 load(const float* p) {
    F16 r;
    __builtin_memcpy(r.v, p, 64);
    return r;
}
KDT_INLINE F16 load_n(const float* p, int n) {  // lanes from n on are +0 and not read
    F16 r{};
    for (int i = 0; i < n; ++i) r.v[i] = p[i];
    return r;
}
KDT_INLINE void store(float* p, const F16& a) {
    __builtin_memcpy(p, a.v, 64);
}
KDT_INLINE void store_n(float* p, const F16& a, int n) {
    for (int i = 0; i < n; ++i) p[i] = a.v[i];
}
KDT_INLINE F16 add(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] + b.v[i];
    return r;
}
KDT_INLINE F16 sub(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] - b.v[i];
    return r;
}
KDT_INLINE F16 mul(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] * b.v[i];
    return r;
}
KDT_INLINE F16 div(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] / b.v[i];
    return r;
}
KDT_INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
    F16 r;
    KDT_FOR_LANES r.v[i] = fma1(a.v[i], b.v[i], c.v[i]);
    return r;
}
// a > b ? a : b, so b where either is NaN; min likewise.
KDT_INLINE F16 max(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
    return r;
}
KDT_INLINE F16 min(const F16& a, const F16& b) {
    F16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
    return r;
}

KDT_INLINE M16 lt(const F16& a, const F16& b) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] < b.v[i] ? ~0u : 0u;
    return r;
}
KDT_INLINE M16 ge(const F16& a, const F16& b) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] >= b.v[i] ? ~0u : 0u;
    return r;
}
KDT_INLINE M16 eq(const F16& a, const F16& b) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] == b.v[i] ? ~0u : 0u;
    return r;
}
KDT_INLINE M16 is_nan(const F16& a) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] != a.v[i] ? ~0u : 0u;
    return r;
}
KDT_INLINE M16 first_lanes(int n) {
    M16 r;
    KDT_FOR_LANES r.v[i] = i < n ? ~0u : 0u;
    return r;
}
KDT_INLINE M16 both(const M16& a, const M16& b) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] & b.v[i];
    return r;
}
KDT_INLINE M16 either(const M16& a, const M16& b) {
    M16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] | b.v[i];
    return r;
}
KDT_INLINE uint32_t lane_bits(const M16& a) {
    uint32_t r = 0;
    KDT_FOR_LANES r |= (a.v[i] & 1u) << i;
    return r;
}
KDT_INLINE F16 select(const M16& m, const F16& yes, const F16& no) {
    F16 r;
    KDT_FOR_LANES r.v[i] = m.v[i] ? yes.v[i] : no.v[i];
    return r;
}
KDT_INLINE I16 select(const M16& m, const I16& yes, const I16& no) {
    I16 r;
    KDT_FOR_LANES r.v[i] = m.v[i] ? yes.v[i] : no.v[i];
    return r;
}

KDT_INLINE I16 iset1(uint32_t x) {
    I16 r;
    KDT_FOR_LANES r.v[i] = x;
    return r;
}
KDT_INLINE I16 lane_index() {
    I16 r;
    KDT_FOR_LANES r.v[i] = static_cast<uint32_t>(i);
    return r;
}
KDT_INLINE I16 iload(const void* p) {
    I16 r;
    __builtin_memcpy(r.v, p, 64);
    return r;
}
KDT_INLINE I16 iload_n(const void* p, int n) {
    I16 r{};
    for (int i = 0; i < n; ++i) r.v[i] = static_cast<const uint32_t*>(p)[i];
    return r;
}
KDT_INLINE void istore(void* p, const I16& a) {
    __builtin_memcpy(p, a.v, 64);
}
KDT_INLINE I16 iadd(const I16& a, const I16& b) {
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] + b.v[i];
    return r;
}
KDT_INLINE I16 isub(const I16& a, const I16& b) {
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] - b.v[i];
    return r;
}
KDT_INLINE I16 iand(const I16& a, const I16& b) {
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] & b.v[i];
    return r;
}
KDT_INLINE I16 ixor(const I16& a, const I16& b) {
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] ^ b.v[i];
    return r;
}
KDT_INLINE M16 ilt(const I16& a, const I16& b) {  // signed
    M16 r;
    KDT_FOR_LANES r.v[i] = static_cast<int32_t>(a.v[i]) < static_cast<int32_t>(b.v[i]) ? ~0u : 0u;
    return r;
}
template <int N>
KDT_INLINE I16 shl(const I16& a) {
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] << N;
    return r;
}
template <int N>
KDT_INLINE I16 shr(const I16& a) {  // logical
    I16 r;
    KDT_FOR_LANES r.v[i] = a.v[i] >> N;
    return r;
}
template <int N>
KDT_INLINE I16 sra(const I16& a) {  // arithmetic
    I16 r;
    KDT_FOR_LANES r.v[i] = static_cast<uint32_t>(static_cast<int32_t>(a.v[i]) >> N);
    return r;
}
KDT_INLINE F16 from_bits(const I16& a) {
    F16 r;
    __builtin_memcpy(r.v, a.v, 64);
    return r;
}
KDT_INLINE I16 to_bits(const F16& a) {
    I16 r;
    __builtin_memcpy(r.v, a.v, 64);
    return r;
}
KDT_INLINE F16 from_int(const I16& a) {  // of the signed value, rounded to nearest
    F16 r;
    KDT_FOR_LANES r.v[i] = static_cast<float>(static_cast<int32_t>(a.v[i]));
    return r;
}
// High and low word of the 64-bit products.
KDT_INLINE void mul_wide(const I16& a, uint32_t b, I16& high, I16& low) {
    KDT_FOR_LANES {
        const uint64_t p = static_cast<uint64_t>(a.v[i]) * b;
        high.v[i] = static_cast<uint32_t>(p >> 32);
        low.v[i] = static_cast<uint32_t>(p);
    }
}

// The lane tree: (l, l + 8), (l, l + 4), (l, l + 2), (l, l + 1).
KDT_INLINE float lane_sum(const F16& a) {
    float t[8];
    for (int i = 0; i < 8; ++i) t[i] = a.v[i] + a.v[i + 8];
    for (int i = 0; i < 4; ++i) t[i] = t[i] + t[i + 4];
    for (int i = 0; i < 2; ++i) t[i] = t[i] + t[i + 2];
    return t[0] + t[1];
}
KDT_INLINE void lane_sum4(const F16& a, const F16& b, const F16& c, const F16& d, float* out) {
    out[0] = lane_sum(a);
    out[1] = lane_sum(b);
    out[2] = lane_sum(c);
    out[3] = lane_sum(d);
}

// Nibbles as two's complement in the low bits of each word, times a scale: 4-bit weights, rounded once.
using NibbleTable = F16;  // the scale
KDT_INLINE NibbleTable nibble_table(const F16& scale) {
    return scale;
}
template <int J>
KDT_INLINE F16 unpack_nibble(const I16& words, const NibbleTable& table) {  // nibble J of each word
    return mul(from_int(sra<28>(shl<28 - 4 * J>(words))), table);
}

// Dot tiles, as many accumulators as the registers hold: rows of float32 weights, rows of packed weights, and
// the most (row, output) pairs of a tile of more than one row.
inline constexpr int kTileRows = 2;
inline constexpr int kTileRowsPacked = 2;
inline constexpr int kTileCells = 4;

#undef KDT_FOR_LANES
