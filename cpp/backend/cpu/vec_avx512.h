// Sixteen float lanes in one zmm register: the AVX-512 path. See vec_portable.h for what each operation
// means.

using F16 = __m512;
using I16 = __m512i;
using M16 = __mmask16;

KDT_INLINE F16 zero() {
    return _mm512_setzero_ps();
}
KDT_INLINE F16 set1(float x) {
    return _mm512_set1_ps(x);
}
KDT_INLINE F16 load(const float* p) {
    return _mm512_loadu_ps(p);
}
KDT_INLINE M16 first_lanes(int n) {
    return static_cast<M16>((1u << n) - 1u);
}
KDT_INLINE F16 load_n(const float* p, int n) {
    return _mm512_maskz_loadu_ps(first_lanes(n), p);
}
KDT_INLINE void store(float* p, F16 a) {
    _mm512_storeu_ps(p, a);
}
KDT_INLINE void store_n(float* p, F16 a, int n) {
    _mm512_mask_storeu_ps(p, first_lanes(n), a);
}
KDT_INLINE F16 add(F16 a, F16 b) {
    return _mm512_add_ps(a, b);
}
KDT_INLINE F16 sub(F16 a, F16 b) {
    return _mm512_sub_ps(a, b);
}
KDT_INLINE F16 mul(F16 a, F16 b) {
    return _mm512_mul_ps(a, b);
}
KDT_INLINE F16 div(F16 a, F16 b) {
    return _mm512_div_ps(a, b);
}
KDT_INLINE F16 fma(F16 a, F16 b, F16 c) {
    return _mm512_fmadd_ps(a, b, c);
}
KDT_INLINE F16 max(F16 a, F16 b) {
    return _mm512_max_ps(a, b);
}
KDT_INLINE F16 min(F16 a, F16 b) {
    return _mm512_min_ps(a, b);
}

KDT_INLINE M16 lt(F16 a, F16 b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
KDT_INLINE M16 ge(F16 a, F16 b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}
KDT_INLINE M16 eq(F16 a, F16 b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
KDT_INLINE M16 is_nan(F16 a) {
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}
KDT_INLINE M16 both(M16 a, M16 b) {
    return static_cast<M16>(a & b);
}
KDT_INLINE M16 either(M16 a, M16 b) {
    return static_cast<M16>(a | b);
}
KDT_INLINE uint32_t lane_bits(M16 a) {
    return a;
}
KDT_INLINE F16 select(M16 m, F16 yes, F16 no) {
    return _mm512_mask_blend_ps(m, no, yes);
}
KDT_INLINE I16 select(M16 m, I16 yes, I16 no) {
    return _mm512_mask_blend_epi32(m, no, yes);
}

KDT_INLINE I16 iset1(uint32_t x) {
    return _mm512_set1_epi32(static_cast<int>(x));
}
KDT_INLINE I16 lane_index() {
    return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
KDT_INLINE I16 iload(const void* p) {
    return _mm512_loadu_si512(p);
}
KDT_INLINE I16 iload_n(const void* p, int n) {
    return _mm512_maskz_loadu_epi32(first_lanes(n), p);
}
KDT_INLINE void istore(void* p, I16 a) {
    _mm512_storeu_si512(p, a);
}
KDT_INLINE I16 iadd(I16 a, I16 b) {
    return _mm512_add_epi32(a, b);
}
KDT_INLINE I16 isub(I16 a, I16 b) {
    return _mm512_sub_epi32(a, b);
}
KDT_INLINE I16 iand(I16 a, I16 b) {
    return _mm512_and_si512(a, b);
}
KDT_INLINE I16 ixor(I16 a, I16 b) {
    return _mm512_xor_si512(a, b);
}
KDT_INLINE M16 ilt(I16 a, I16 b) {
    return _mm512_cmplt_epi32_mask(a, b);
}
template <int N>
KDT_INLINE I16 shl(I16 a) {
    return _mm512_slli_epi32(a, N);
}
template <int N>
KDT_INLINE I16 shr(I16 a) {
    return _mm512_srli_epi32(a, N);
}
template <int N>
KDT_INLINE I16 sra(I16 a) {
    return _mm512_srai_epi32(a, N);
}
KDT_INLINE F16 from_bits(I16 a) {
    return _mm512_castsi512_ps(a);
}
KDT_INLINE I16 to_bits(F16 a) {
    return _mm512_castps_si512(a);
}
KDT_INLINE F16 from_int(I16 a) {
    return _mm512_cvtepi32_ps(a);
}
KDT_INLINE void mul_wide(I16 a, uint32_t b, I16& high, I16& low) {
    const I16 factor = _mm512_set1_epi64(b);
    const I16 even = _mm512_mul_epu32(a, factor);
    const I16 odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), factor);
    high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
    low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}

// [l + (l + 8)] of a, then of b, each reduced once more to four lanes.
KDT_INLINE __m256 lane_fold(F16 a) {
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}
KDT_INLINE float lane_sum(F16 a) {
    const __m256 t8 = lane_fold(a);
    const __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
    const __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
    return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
KDT_INLINE void lane_sum4(F16 a, F16 b, F16 c, F16 d, float* out) {
    const __m256 a8 = lane_fold(a), b8 = lane_fold(b), c8 = lane_fold(c), d8 = lane_fold(d);
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

using NibbleTable = __m512;  // the sixteen weights that a nibble can mean, in two's complement order
KDT_INLINE NibbleTable nibble_table(F16 scale) {
    const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
    return _mm512_mul_ps(values, scale);
}
template <int J>
KDT_INLINE F16 unpack_nibble(I16 words, NibbleTable table) {
    return _mm512_permutexvar_ps(J == 0 ? words : _mm512_srli_epi32(words, 4 * J), table);
}

// Dot tiles, as many accumulators as the registers hold: rows of float32 weights, rows of packed weights, and
// the most (row, output) pairs of a tile of more than one row.
inline constexpr int kTileRows = 4;
inline constexpr int kTileRowsPacked = 4;
inline constexpr int kTileCells = 16;
