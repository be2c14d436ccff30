// Sixteen float lanes in two ymm registers: the AVX2 + FMA path. See vec_portable.h for what each operation
// means.

struct F16 {
    __m256 a, b;  // lanes 0..7, 8..15
};
struct I16 {
    __m256i a, b;
};
struct M16 {
    __m256 a, b;
};

KDT_INLINE F16 zero() {
    return {_mm256_setzero_ps(), _mm256_setzero_ps()};
}
KDT_INLINE F16 set1(float x) {
    return {_mm256_set1_ps(x), _mm256_set1_ps(x)};
}
KDT_INLINE F16 load(const float* p) {
    return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}
KDT_INLINE __m256i lanes_below(int n) {  // of eight
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
KDT_INLINE M16 first_lanes(int n) {
    return {_mm256_castsi256_ps(lanes_below(n)), _mm256_castsi256_ps(lanes_below(n - 8))};
}
KDT_INLINE F16 load_n(const float* p, int n) {
    return {_mm256_maskload_ps(p, lanes_below(n)), _mm256_maskload_ps(p + 8, lanes_below(n - 8))};
}
KDT_INLINE void store(float* p, F16 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
KDT_INLINE void store_n(float* p, F16 x, int n) {
    _mm256_maskstore_ps(p, lanes_below(n), x.a);
    _mm256_maskstore_ps(p + 8, lanes_below(n - 8), x.b);
}
KDT_INLINE F16 add(F16 x, F16 y) {
    return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)};
}
KDT_INLINE F16 sub(F16 x, F16 y) {
    return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)};
}
KDT_INLINE F16 mul(F16 x, F16 y) {
    return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)};
}
KDT_INLINE F16 div(F16 x, F16 y) {
    return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)};
}
KDT_INLINE F16 fma(F16 x, F16 y, F16 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
KDT_INLINE F16 max(F16 x, F16 y) {
    return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)};
}
KDT_INLINE F16 min(F16 x, F16 y) {
    return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)};
}

KDT_INLINE M16 lt(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
KDT_INLINE M16 ge(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_GE_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_GE_OQ)};
}
KDT_INLINE M16 eq(F16 x, F16 y) {
    return {_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
KDT_INLINE M16 is_nan(F16 x) {
    return {_mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q)};
}
KDT_INLINE M16 both(M16 x, M16 y) {
    return {_mm256_and_ps(x.a, y.a), _mm256_and_ps(x.b, y.b)};
}
KDT_INLINE M16 either(M16 x, M16 y) {
    return {_mm256_or_ps(x.a, y.a), _mm256_or_ps(x.b, y.b)};
}
KDT_INLINE uint32_t lane_bits(M16 x) {
    return static_cast<uint32_t>(_mm256_movemask_ps(x.a)) | static_cast<uint32_t>(_mm256_movemask_ps(x.b))
                                                                << 8;
}
KDT_INLINE F16 select(M16 m, F16 yes, F16 no) {
    return {_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}
KDT_INLINE I16 select(M16 m, I16 yes, I16 no) {
    return {_mm256_blendv_epi8(no.a, yes.a, _mm256_castps_si256(m.a)),
            _mm256_blendv_epi8(no.b, yes.b, _mm256_castps_si256(m.b))};
}

KDT_INLINE I16 iset1(uint32_t x) {
    const __m256i v = _mm256_set1_epi32(static_cast<int>(x));
    return {v, v};
}
KDT_INLINE I16 lane_index() {
    return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
KDT_INLINE I16 iload(const void* p) {
    return {_mm256_loadu_si256(static_cast<const __m256i*>(p)),
            _mm256_loadu_si256(static_cast<const __m256i*>(p) + 1)};
}
KDT_INLINE I16 iload_n(const void* p, int n) {
    const int* q = static_cast<const int*>(p);
    return {_mm256_maskload_epi32(q, lanes_below(n)), _mm256_maskload_epi32(q + 8, lanes_below(n - 8))};
}
KDT_INLINE void istore(void* p, I16 x) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, x.b);
}
KDT_INLINE I16 iadd(I16 x, I16 y) {
    return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)};
}
KDT_INLINE I16 isub(I16 x, I16 y) {
    return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)};
}
KDT_INLINE I16 iand(I16 x, I16 y) {
    return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
KDT_INLINE I16 ixor(I16 x, I16 y) {
    return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)};
}
KDT_INLINE M16 ilt(I16 x, I16 y) {
    return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(y.a, x.a)),
            _mm256_castsi256_ps(_mm256_cmpgt_epi32(y.b, x.b))};
}
template <int N>
KDT_INLINE I16 shl(I16 x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N>
KDT_INLINE I16 shr(I16 x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N>
KDT_INLINE I16 sra(I16 x) {
    return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)};
}
KDT_INLINE F16 from_bits(I16 x) {
    return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)};
}
KDT_INLINE I16 to_bits(F16 x) {
    return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)};
}
KDT_INLINE F16 from_int(I16 x) {
    return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)};
}
KDT_INLINE void mul_wide8(__m256i x, __m256i factor, __m256i& high, __m256i& low) {
    const __m256i even = _mm256_mul_epu32(x, factor);
    const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), factor);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
KDT_INLINE void mul_wide(I16 x, uint32_t y, I16& high, I16& low) {
    const __m256i factor = _mm256_set1_epi64x(y);
    mul_wide8(x.a, factor, high.a, low.a);
    mul_wide8(x.b, factor, high.b, low.b);
}

KDT_INLINE float lane_sum(F16 x) {
    const __m256 t8 = _mm256_add_ps(x.a, x.b);
    const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
KDT_INLINE void lane_sum4(F16 a, F16 b, F16 c, F16 d, float* out) {
    const __m256 a8 = _mm256_add_ps(a.a, a.b), b8 = _mm256_add_ps(b.a, b.b);
    const __m256 c8 = _mm256_add_ps(c.a, c.b), d8 = _mm256_add_ps(d.a, d.b);
    const __m256 ab =
        _mm256_add_ps(_mm256_permute2f128_ps(a8, b8, 0x20), _mm256_permute2f128_ps(a8, b8, 0x31));
    const __m256 cd =
        _mm256_add_ps(_mm256_permute2f128_ps(c8, d8, 0x20), _mm256_permute2f128_ps(c8, d8, 0x31));
    const __m256 low = _mm256_shuffle_ps(ab, cd, 0x44);   // a0 a1 c0 c1 | b0 b1 d0 d1
    const __m256 high = _mm256_shuffle_ps(ab, cd, 0xEE);  // a2 a3 c2 c3 | b2 b3 d2 d3
    const __m256 t = _mm256_add_ps(low, high);
    const __m256 s = _mm256_add_ps(t, _mm256_movehdup_ps(t));  // a . c . | b . d .
    const __m128 sum = _mm_blend_ps(_mm256_castps256_ps128(s), _mm_moveldup_ps(_mm256_extractf128_ps(s, 1)),
                                    0xA);  // a b c d
    _mm_storeu_ps(out, sum);
}

using NibbleTable = F16;  // the scale
KDT_INLINE NibbleTable nibble_table(F16 scale) {
    return scale;
}
template <int J>
KDT_INLINE __m256 unpack_nibble8(__m256i words, __m256 scale) {
    const __m256i top = J == 7 ? words : _mm256_slli_epi32(words, 28 - 4 * J);
    return _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_srai_epi32(top, 28)), scale);
}
template <int J>
KDT_INLINE F16 unpack_nibble(I16 words, NibbleTable table) {
    return {unpack_nibble8<J>(words.a, table.a), unpack_nibble8<J>(words.b, table.b)};
}

// Dot tiles, as many accumulators as the registers hold: rows of float32 weights, rows of packed weights, and
// the most (row, output) pairs of a tile of more than one row.
inline constexpr int kTileRows = 3;
inline constexpr int kTileRowsPacked = 2;
inline constexpr int kTileCells = 6;
