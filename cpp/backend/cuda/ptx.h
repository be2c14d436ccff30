// The instructions that CUDA C++ has no word for, one thin wrapper each, and nothing else. All of them exist
// on sm_90 and sm_120 alike. tests/cuda/emulator holds a second version of this file in plain C++, found
// first on its include path, with which every kernel also runs on a CPU.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace kdt::cuda::ptx {

// The block's dynamic shared memory, 128-byte aligned. Kernels use no other kind.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char kdt_shared_memory[];
    return kdt_shared_memory;
}

// A place in shared memory as a 32-bit address: half the registers of a pointer.
__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// d = a . b + c on one 16 x 8 tile, K = 16. Lane l has g = l / 4, t = l % 4.
//   a: rows g and g + 8. a0 (g; k 2t, 2t+1)  a1 (g+8; same)  a2 (g; k 2t+8, 2t+9)  a3 (g+8; same)
//   b: column g.         b0 (k 2t, 2t+1)     b1 (k 2t+8, 2t+9)
//   d: d0, d1 (row g; columns 2t, 2t+1)      d2, d3 (row g+8; same)
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                         uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The same with c = 0, which takes no registers.
__device__ __forceinline__ void mma_bf16_zero(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                              uint32_t a3, uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%10, %10, %10, %10};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}

// Four 8 x 8 tiles of 16-bit elements; lane l passes the address of row l % 8 of tile l / 8. Register i of
// lane l gets elements (2 (l % 4), 2 (l % 4) + 1) of row l / 4 of tile i; transposed: of column l / 4.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Two floats rounded to bf16 (nearest even), `low` in the low half.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}

// a - b on both halves, rounded to bf16 (exact where it is used).
__device__ __forceinline__ uint32_t subtract_bf16x2(uint32_t a, uint32_t b) {
    uint32_t d;
    asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (word & 0x000F000F) | 0x43004300 in one instruction: left to itself the compiler makes it two.
__device__ __forceinline__ uint32_t nibbles_as_bf16x2(uint32_t word) {
    uint32_t d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(word), "n"(0x000F000F), "r"(0x43004300));
    return d;
}

// The same number, of which the compiler no longer knows where it comes from: keeps a loop from being
// unrolled where
// `#pragma unroll 1` does not.
__device__ __forceinline__ int opaque(int value) {
    asm volatile("" : "+r"(value));
    return value;
}

// 2^x by the hardware's table (at most 2 ulp; subnormal results are zero; -inf gives 0).
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 16 bytes from global to shared memory, past L1, without a register. With `valid` false nothing is read and
// 16 zero bytes are written.
__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global),
                 "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most `Pending` of this thread's newest groups are unfinished.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// Barriers in shared memory (mbarrier), for warps that work at their own pace. A barrier's phase ends when
// `count` arrivals have come; then the next begins. Phase n of a barrier, from 0, has parity n % 2. What a
// thread of the block wrote before it arrived is seen by whoever has waited. Every thread that has read or
// written arrives for itself: one lane's arrival after __syncwarp would order as much, but racecheck does not
// follow it (nor a read before `barrier.cta.arrive`), and a kernel that no tool can check is not worth
// the 3 % of a dense product of 64 rows.
__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Between barrier_init and what uses the barriers of it that is no instruction of a thread (bulk_copy); a
// barrier of the block follows.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier that block `rank` of the cluster has at the same place: tells that what this thread
// has read may be overwritten, not what it has written.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 at;\nmapa.shared::cluster.u32 at, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [at];\n}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Arrives and adds `bytes` to what the phase waits for: cluster_store_async and bulk_copy take them off
// again.
__device__ __forceinline__ void barrier_arrive_expecting(uint32_t barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

// Arrives when every earlier copy_async_16 of this thread has landed. The barrier counts the thread.
__device__ __forceinline__ void copy_async_arrive(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns when the phase of this parity has ended, to a whole warp together: lanes may see the end at
// different times (on a GPU that others use too they do), and what follows is often for all lanes at once
// (mma, ldmatrix). Call it only for the phase that runs or the one before it:
// parity cannot tell others apart.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\nWAIT:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra WAIT;\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
    __syncwarp();
}

// Bytes (a multiple of 16, from and to 16-byte aligned places) from global to this block's shared memory, by
// one thread. They have landed when the barrier's phase has ended.
__device__ __forceinline__ void bulk_copy(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// 16 or 8 bytes from shared memory.
__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(shared)
                 : "memory");
    return v;
}

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
    return v;
}

// 16 or 8 bytes of read-only data that nobody will want again from this SM; nothing is read, and the result
// is anything, unless `wanted`.
__device__ __forceinline__ uint4 load_streaming(const void* global, bool wanted = true) {
    uint4 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %5, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(global), "r"(static_cast<int>(wanted)));
    return v;
}

__device__ __forceinline__ uint2 load_streaming_8(const void* global, bool wanted = true) {
    uint2 v;
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
        "@p ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];\n}"
        : "=r"(v.x), "=r"(v.y)
        : "l"(global), "r"(static_cast<int>(wanted)));
    return v;
}

// Programmatic dependent launch: a kernel may start while its predecessor still runs. `grid_wait` blocks
// until every earlier kernel of the stream has finished and its writes are visible; nothing that an earlier
// kernel wrote may be read, and nothing that it reads may be written, before. Every kernel calls it in every
// thread.
__device__ __forceinline__ void grid_wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void grid_launch_next() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Thread block clusters.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

// A word of block `rank`'s shared memory, at the place that `mine` has in the caller's.
__device__ __forceinline__ uint32_t cluster_load_word(const void* mine, uint32_t rank) {
    uint32_t remote, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(remote)
                 : "r"(shared_address(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.b32 %0, [%1];" : "=r"(value) : "r"(remote) : "memory");
    return value;
}

__device__ __forceinline__ float cluster_load(const float* mine, uint32_t rank) {
    return __uint_as_float(cluster_load_word(mine, rank));
}

// Writes to block `rank`'s shared memory, at the place that `mine` has in the caller's; then takes 16 bytes
// off what that block's `barrier` waits for: whoever has waited there sees them.
__device__ __forceinline__ void cluster_store_async(uint32_t mine, float4 v, uint32_t barrier,
                                                    uint32_t rank) {
    asm volatile(
        "{\n.reg .b32 to, at;\nmapa.shared::cluster.u32 to, %0, %2;\n"
        "mapa.shared::cluster.u32 at, %1, %2;\n"
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [to], {%3, %4, %5, %6}, "
        "[at];\n}" ::"r"(mine),
        "r"(barrier), "r"(rank), "r"(__float_as_uint(v.x)), "r"(__float_as_uint(v.y)),
        "r"(__float_as_uint(v.z)), "r"(__float_as_uint(v.w))
        : "memory");
}

}  // namespace kdt::cuda::ptx
