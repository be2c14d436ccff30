// Attention in float32, for exactness: one row, one head, one run of its splits a block.
#include "backend/cuda/attention.cuh"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kMaxColumns = 4;  // of the latent, a thread

// Scores: a warp a key, lane l takes columns l, l + 32, ... ascending by fma, then the warp's tree. Output: a
// thread a column, keys ascending by fma.
__global__ void __launch_bounds__(kThreads, 1) attend_f32(const AttentionArgs a) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int row = a.rows.first + static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
    const int width = a.latent + a.rope;
    const KeySpan span = key_span(a.batch, row);
    const int2 splits = splits_of_block(static_cast<int>(blockIdx.x), a.blocks, span.count);
    if (splits.x >= splits.y) return;

    float* const q = reinterpret_cast<float*>(ptx::shared_memory());
    float* const p = q + (width + 1) / 2 * 2;
    float* const factor = p + kChunkSize;
    const float** const address = reinterpret_cast<const float**>(factor + 2);
    for (int c = thread; c < width; c += kThreads)
        q[c] = load_activation(a.q + (static_cast<long long>(row) * a.heads + head) * width + c);

    const long long row_at = (static_cast<long long>(blockIdx.z) * a.heads + head) * a.parts;
    for (int split = splits.x; split < splits.y; ++split) {
        float o[kMaxColumns] = {}, m = -INFINITY, l = 0.0f;
        const int end = min(split_start(split + 1), span.count);
        for (int start = split_start(split); start < end; start += kChunkSize) {
            const int count = min(kChunkSize, end - start);
            __syncthreads();
            if (thread < kChunkSize)
                address[thread] = reinterpret_cast<const float*>(
                    key_row(a.cache, a.batch, row, span.prefix, span.ancestors, start + thread, width * 4));
            __syncthreads();
            for (int key = warp; key < count; key += kThreads / 32) {
                const float* k = address[key];
                float s = 0.0f;
                if (k != nullptr)
                    for (int c = lane; c < width; c += 32) s = fmaf(q[c], load_activation(k + c), s);
                s = warp_sum(s);
                if (lane == 0) p[key] = s * a.scale_log2;
            }
            __syncthreads();
            if (warp == 0) {
                const float x0 = lane < count ? p[lane] : -INFINITY;
                const float x1 = lane + 32 < count ? p[lane + 32] : -INFINITY;
                const float now = fmaxf(m, warp_max(fmaxf(x0, x1)));
                const float p0 = ptx::exp2_approx(x0 - now), p1 = ptx::exp2_approx(x1 - now);
                const float shrink = ptx::exp2_approx(m - now);
                p[lane] = p0;
                p[lane + 32] = p1;
                l = fmaf(l, shrink, warp_sum(p0 + p1));
                m = now;
                if (lane == 0) factor[0] = shrink;
            }
            __syncthreads();
            for (int i = 0; i < kMaxColumns; ++i) {
                const int c = thread + i * kThreads;
                if (c >= a.latent) break;
                o[i] *= factor[0];
                for (int j = 0; j < count; ++j)
                    if (address[j] != nullptr) o[i] = fmaf(p[j], load_activation(address[j] + c), o[i]);
            }
        }
        for (int i = 0; i < kMaxColumns; ++i)
            if (thread + i * kThreads < a.latent)
                a.part[(row_at + split) * a.latent + thread + i * kThreads] = o[i];
        if (thread < kStateSets)  // warp 0 holds the state: all of it in the first place
            a.state[(row_at + split) * kStateSets + thread] =
                thread == 0 ? make_float2(m, l) : make_float2(-INFINITY, 0.0f);
    }
}

}  // namespace

void launch_attend_f32(const GemmLaunch& l, AttentionArgs args) {
    args.blocks = attention_blocks(args.rows.count * args.heads, args.parts, 4 * l.machine.sms);
    const int width = args.latent + args.rope;
    const int shared = ((width + 1) / 2 * 2 + kChunkSize + 2) * 4 + kChunkSize * 8;
    launch<attend_f32>(
        {l.stream, l.device, l.name, dim3(args.blocks, args.heads, args.rows.count), kThreads, shared}, args);
}

}  // namespace kdt::cuda
