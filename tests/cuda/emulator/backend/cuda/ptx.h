// cpp/backend/cuda/ptx.h for the emulator: the same functions in plain C++.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <source_location>

namespace kdt::cuda::ptx {

inline unsigned char* shared_memory() {
    return kdt_emulator::shared_memory();
}

inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory());
}

namespace emulated {

KDT_UNCHECKED inline float bf16(uint32_t word, int half) {
    return __uint_as_float(half ? word & 0xFFFF0000u : word << 16);
}

inline uint32_t round_bf16(float x) {
    const uint32_t bits = __float_as_uint(x);
    if (x != x) return 0x7FFF;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

struct Mma {
    uint32_t a[4], b[2];
    float c[4];
};

KDT_UNCHECKED inline void multiply(const kdt_emulator::Warp& w) {
    Mma lanes[32];
    for (int l = 0; l < 32; ++l) std::memcpy(&lanes[l], w.in[l], sizeof(Mma));
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i)
            for (int h = 0; h < 2; ++h) {
                a[l / 4 + i % 2 * 8][2 * (l % 4) + h + i / 2 * 8] = bf16(lanes[l].a[i], h);
                if (i < 2) b[2 * (l % 4) + h + i * 8][l / 4] = bf16(lanes[l].b[i], h);
            }
    for (int l = 0; l < 32; ++l) {
        float d[4];
        for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = 2 * (l % 4) + i % 2;
            double sum = 0.0;
            for (int k = 0; k < 16; ++k)
                sum += static_cast<double>(a[row][k]) * static_cast<double>(b[k][column]);
            d[i] = static_cast<float>(static_cast<double>(lanes[l].c[i]) + sum);
        }
        std::memcpy(w.out[l], d, sizeof d);
    }
}

template <bool Transposed>
KDT_UNCHECKED void load_matrix(const kdt_emulator::Warp& w) {
    const uint16_t* rows[32];
    for (int l = 0; l < 32; ++l) std::memcpy(&rows[l], w.in[l], sizeof(void*));
    for (int l = 0; l < 32; ++l) {
        uint32_t r[4];
        for (int i = 0; i < 4; ++i) {
            uint32_t v[2];
            for (int h = 0; h < 2; ++h)
                v[h] =
                    Transposed ? rows[8 * i + 2 * (l % 4) + h][l / 4] : rows[8 * i + l / 4][2 * (l % 4) + h];
            r[i] = v[0] | v[1] << 16;
        }
        std::memcpy(w.out[l], r, sizeof r);
    }
}

struct Words {
    uint32_t r[4];
};
struct Floats {
    float d[4];
};

}  // namespace emulated

inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                     uint32_t b1) {
    const emulated::Mma in{{a0, a1, a2, a3}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
    const auto out = kdt_emulator::collective<emulated::Mma, emulated::Floats>(emulated::multiply, in);
    for (int i = 0; i < 4; ++i) d[i] = out.d[i];
}

inline void mma_bf16_zero(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                          uint32_t b1) {
    for (int i = 0; i < 4; ++i) d[i] = 0.0f;
    mma_bf16(d, a0, a1, a2, a3, b0, b1);
}

// To the race detector a row is read by the lane that names it.
inline void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    kdt_emulator::races::touch(shared_memory() + row, 16, kdt_emulator::races::Access::read);
    const auto out = kdt_emulator::collective<const void*, emulated::Words>(emulated::load_matrix<false>,
                                                                            shared_memory() + row);
    for (int i = 0; i < 4; ++i) r[i] = out.r[i];
}

inline void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t row) {
    kdt_emulator::races::touch(shared_memory() + row, 16, kdt_emulator::races::Access::read);
    const auto out = kdt_emulator::collective<const void*, emulated::Words>(emulated::load_matrix<true>,
                                                                            shared_memory() + row);
    for (int i = 0; i < 4; ++i) r[i] = out.r[i];
}

inline uint32_t pack_bf16(float low, float high) {
    return emulated::round_bf16(low) | emulated::round_bf16(high) << 16;
}

inline uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
    return pack_bf16(emulated::bf16(a, 0) - emulated::bf16(b, 0),
                     emulated::bf16(a, 1) - emulated::bf16(b, 1));
}

inline uint32_t nibbles_as_bf16x2(uint32_t word) {
    return (word & 0x000F000Fu) | 0x43004300u;
}

inline int opaque(int value) {
    return value;
}

inline float exp2_approx(float x) {
    return exp2f(x);
}

inline void copy_async_16(uint32_t shared, const void* global) {
    kdt_emulator::copy_async(shared_memory() + shared, global, true);
}
inline void copy_async_16(uint32_t shared, const void* global, bool valid) {
    kdt_emulator::copy_async(shared_memory() + shared, global, valid);
}
inline void copy_async_commit() {
    kdt_emulator::copy_async_commit();
}
template <int Pending>
void copy_async_wait(const std::source_location& place = std::source_location::current()) {
    kdt_emulator::copy_async_wait(Pending, place);
}

inline void barrier_init(uint32_t barrier, int count) {
    kdt_emulator::barrier_init(shared_memory() + barrier, count);
}
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier,
                           const std::source_location& place = std::source_location::current()) {
    kdt_emulator::barrier_arrive(shared_memory() + barrier, 0, place);
}
inline void barrier_arrive(uint32_t barrier, uint32_t rank,
                           const std::source_location& place = std::source_location::current()) {
    kdt_emulator::barrier_arrive(
        const_cast<void*>(kdt_emulator::cluster_address(shared_memory() + barrier, rank)), 0, place);
}
inline void barrier_arrive_expecting(uint32_t barrier, int bytes,
                                     const std::source_location& place = std::source_location::current()) {
    kdt_emulator::barrier_arrive(shared_memory() + barrier, bytes, place);
}
inline void copy_async_arrive(uint32_t barrier,
                              const std::source_location& place = std::source_location::current()) {
    kdt_emulator::copy_async_arrive(shared_memory() + barrier, place);
}
inline void barrier_wait(uint32_t barrier, int parity,
                         const std::source_location& place = std::source_location::current()) {
    kdt_emulator::barrier_wait(shared_memory() + barrier, parity, place);
}

inline void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    kdt_emulator::bulk_copy(shared_memory() + shared, global, bytes, shared_memory() + barrier);
}

inline uint4 load_shared_16(uint32_t shared) {
    return *reinterpret_cast<const uint4*>(shared_memory() + shared);
}

inline uint2 load_shared_8(uint32_t shared) {
    return *reinterpret_cast<const uint2*>(shared_memory() + shared);
}

inline uint4 load_streaming(const void* global, bool wanted = true) {
    return wanted ? *static_cast<const uint4*>(global) : uint4{};
}

inline uint2 load_streaming_8(const void* global, bool wanted = true) {
    return wanted ? *static_cast<const uint2*>(global) : uint2{};
}

inline void grid_wait(const std::source_location& place = std::source_location::current()) {
    kdt_emulator::note_grid_wait(place);
}
inline void grid_launch_next() {
    kdt_emulator::note_launch_next();
}

inline void cluster_sync(const std::source_location& place = std::source_location::current()) {
    kdt_emulator::cluster_barrier(place);
}
inline uint32_t cluster_load_word(const void* mine, uint32_t rank) {
    return *static_cast<const uint32_t*>(kdt_emulator::cluster_address(mine, rank));
}
inline void cluster_store_async(uint32_t mine, float4 v, uint32_t barrier, uint32_t rank) {
    kdt_emulator::store_async(
        const_cast<void*>(kdt_emulator::cluster_address(shared_memory() + mine, rank)), &v,
        const_cast<void*>(kdt_emulator::cluster_address(shared_memory() + barrier, rank)));
}
inline float cluster_load(const float* mine, uint32_t rank) {
    return __uint_as_float(cluster_load_word(mine, rank));
}

}  // namespace kdt::cuda::ptx
