// Draft ops that treat each row by itself: taps that wait for the next draft, norm and angle of queries and
// keys, keys and values on their way into pages or into the block.
//
// A warp takes one head of one row. Sum of squares: lane l takes columns l, l + 32, ... ascending by fma,
// then the warp's tree; pair j of the rotation belongs to lane j % 32, which reads both of its elements
// before it writes them, so that queries may stay in place.
//
//   [row, head]  x0 x1 ... x(d-1) --rms_norm--> y --rotate pairs (j, j + d / 2)--> float32, or the cache's
//   type
#include "backend/cuda/draft.cuh"
#include "backend/cuda/launch.h"
#include "backend/cuda/rope.cuh"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

template <bool Bf16>
__device__ __forceinline__ void store(void* to, int column, float value) {
    if (Bf16)
        static_cast<uint16_t*>(to)[column] = static_cast<uint16_t>(ptx::pack_bf16(value, 0.0f));
    else
        static_cast<float*>(to)[column] = value;
}

// to <- rope(rms_norm(x)) of one head, by one warp. `to` may be x.
template <bool Bf16>
__device__ __forceinline__ void norm_rotate_head(const float* x, const float* weight, float eps,
                                                 const RopeTable& rope, int position, void* to) {
    const int lane = static_cast<int>(threadIdx.x) % 32, width = rope.rope, half = width / 2;
    float sum = 0.0f;
    for (int c = lane; c < width; c += 32) {
        const float v = load_activation(x + c);
        sum = fmaf(v, v, sum);
    }
    const float r = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(width) + eps);
    __syncwarp();  // every lane has read what is now written over
    const long long angle = static_cast<long long>(min(max(position, 0), rope.positions - 1)) * half;
    for (int j = lane; j < half; j += 32) {
        const int2 pair = rope_pair(j, width, rope.interleaved);
        const float2 y = rotate(load_activation(x + pair.x) * r * weight[pair.x],
                                load_activation(x + pair.y) * r * weight[pair.y], rope.cos[angle + j],
                                rope.sin[angle + j]);
        store<Bf16>(to, pair.x, y.x);
        store<Bf16>(to, pair.y, y.y);
    }
}

// A block a row and 4 * kThreads columns.
__global__ void __launch_bounds__(kThreads) keep_taps(const KeepTapsArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int j = static_cast<int>(blockIdx.x);
    if (j >= __ldcg(a.length)) return;
    const int from = __ldcg(a.path + j), to = __ldcg(a.first) + j;
    if (from < 0 || from >= kMaxTreeRows || to < 0 || to >= a.capacity) return;
    const float* x = a.taps + static_cast<long long>(from) * a.width;
    float* y = a.kept + static_cast<long long>(to) * a.width;
    const int first = (static_cast<int>(blockIdx.y) * kThreads + static_cast<int>(threadIdx.x)) * 4;
    if (a.width % 4 == 0) {
        if (first < a.width) *reinterpret_cast<float4*>(y + first) = load_activation4(x + first);
    } else {
        for (int c = first; c < first + 4 && c < a.width; ++c) y[c] = load_activation(x + c);
    }
}

__global__ void __launch_bounds__(kThreads) norm_rotate(const NormRotateArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x);
    const int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
    if (row >= live_rows(a.rows) || head >= a.heads) return;
    const long long at = (static_cast<long long>(row) * a.heads + head) * a.rope.rope;
    norm_rotate_head<false>(a.x + at, a.weight, a.eps, a.rope, __ldcg(a.position + row), a.out + at);
}

template <bool Bf16>
__global__ void __launch_bounds__(kThreads) write_key_value(const WriteKeyValueArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
    const int head = static_cast<int>(blockIdx.y) * kWarps + static_cast<int>(threadIdx.x) / 32;
    if (row >= live_rows(a.rows) || head >= a.kv_heads) return;
    const int dim = a.rope.rope, position = __ldcg(a.position + row);
    const int element = Bf16 ? 2 : 4;
    const long long entry_bytes = 2ll * a.kv_heads * dim * element;
    unsigned char* entry;
    if (a.to_block) {
        if (row >= kMaxBlockRows) return;
        entry = static_cast<unsigned char*>(a.cache.block) + row * entry_bytes;
    } else {
        const long long slot = draft_slot(a.cache, __ldcg(a.sequence), position);
        if (slot < 0) return;
        entry = static_cast<unsigned char*>(a.cache.pages) + slot * entry_bytes;
    }
    const long long from = (static_cast<long long>(row) * a.kv_heads + head) * dim;
    norm_rotate_head<Bf16>(a.k + from, a.weight, a.eps, a.rope, position, entry + head * dim * element);
    unsigned char* const value = entry + (a.kv_heads + head) * dim * element;
    for (int c = lane; c < dim; c += 32) store<Bf16>(value, c, load_activation(a.v + from + c));
}

dim3 grid_of(int rows, int heads) {
    return dim3(static_cast<unsigned>(rows), static_cast<unsigned>((heads + kWarps - 1) / kWarps));
}

}  // namespace

void launch_keep_taps(const GemmLaunch& l, const KeepTapsArgs& args) {
    const auto columns = static_cast<unsigned>((args.width + 4 * kThreads - 1) / (4 * kThreads));
    launch<keep_taps>({l.stream, l.device, l.name, dim3(kMaxTreeRows, columns), kThreads}, args);
}

void launch_norm_rotate(const GemmLaunch& l, const NormRotateArgs& args) {
    launch<norm_rotate>({l.stream, l.device, l.name, grid_of(args.rows.capacity, args.heads), kThreads},
                        args);
}

void launch_write_key_value(const GemmLaunch& l, const WriteKeyValueArgs& args, bool bf16_cache) {
    const Launch as{l.stream, l.device, l.name, grid_of(args.rows.capacity, args.kv_heads), kThreads};
    if (bf16_cache)
        launch<write_key_value<true>>(as, args);
    else
        launch<write_key_value<false>>(as, args);
}

}  // namespace kdt::cuda
