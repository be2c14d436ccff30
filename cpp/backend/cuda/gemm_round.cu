// Activations in bf16 and in fragment order, once for all the blocks that read them.
#include "backend/cuda/gemm_block.cuh"

namespace kdt::cuda {

namespace {

constexpr int kThreads = 256;

// A thread makes one lane's share of one fragment: eight columns of one token. Neighbouring threads write
// neighbouring bytes.
__global__ void __launch_bounds__(kThreads) round_activations(const GemmArgs a, int tiles, uint4* rounded) {
    ptx::grid_launch_next();
    ptx::grid_wait();
    const int pieces = a.k_blocks, units = tiles * 64;  // of 16 bytes, of a piece
    const int unit = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
    if (unit >= pieces * units) return;
    const int piece = unit / units, rest = unit - piece * units, lane = rest % 32, fragment = rest / 32;
    const int k32 = fragment / tiles, tile = fragment - k32 * tiles;
    const int head = static_cast<int>(blockIdx.y) % a.heads, group = static_cast<int>(blockIdx.y) / a.heads;
    const int token = (group * tiles + tile) * 8 + lane / 4;
    const int column = piece * kBlockColumns + k32 * 32 + lane % 4 * 8;
    float v[8] = {};
    if (token < a.rows.live_count())
        load_eight(v, a.x + (a.rows.first + token) * a.x_stride + head * a.x_head_stride, column, a.in,
                   a.wide);
    rounded[static_cast<long long>(blockIdx.y) * pieces * units + unit] =
        make_uint4(ptx::pack_bf16(v[0], v[1]), ptx::pack_bf16(v[2], v[3]), ptx::pack_bf16(v[4], v[5]),
                   ptx::pack_bf16(v[6], v[7]));
}

}  // namespace

void launch_round_activations(const GemmLaunch& l, const GemmArgs& args, void* rounded) {
    const int tiles = many_shape(args.rows.count).all(),
              groups = (args.rows.count + tiles * 8 - 1) / (tiles * 8);
    const int units = args.k_blocks * tiles * 64;
    launch<round_activations>({l.stream, l.device, l.name,
                               dim3(static_cast<unsigned>((units + kThreads - 1) / kThreads),
                                    static_cast<unsigned>(args.heads * groups)),
                               kThreads},
                              args, tiles, static_cast<uint4*>(rounded));
}

}  // namespace kdt::cuda
