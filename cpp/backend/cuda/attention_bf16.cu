// Attention of one row over a run of its splits on the tensor cores: up to 64 heads by a cluster of two
// blocks, each with half of the latent's and half of the rope's columns, in steps of 32 keys.
//
//              score warps, even steps          score warps, odd steps            output warps
//              (16 heads each)                  (16 heads each)                   (64 columns each)
//   time  |    q . K(i) over own columns        ... softmax(i-1) -> P(i-1)        o += P(i-2) . V(i-2)
//         |    sums to the partner, its sums    q . K(i+1) over own columns       K(i+2) -> ring
//         v    softmax(i) -> P(i)               sums to the partner, its sums     o += P(i-1) . V(i-1)
//
// Each kind of warp goes at its own pace; barriers in shared memory say what is there and what is free. The
// two blocks add the same two numbers and so hold the same P; nothing else passes between them. A warp's
// tile is one row's: nothing of another row is ever near its arithmetic.
//
// A step's keys begin at an absolute multiple of 32 of the virtual sequence, whether they lie in one page or
// are gathered from a page's end and the tree's scratch rows.
#include "backend/cuda/attention_output.cuh"
#include "backend/cuda/attention_score.cuh"

namespace kdt::cuda {

namespace {

using namespace bf16_attention;

// With 16 heads two blocks fit an SM of sm_90 (and one of sm_120, which has the shared memory for no more).
template <int MT>
constexpr int kBlocksPerSm = MT == 1 ? 2 : 1;

template <int MT, class Shape>
__global__ void __launch_bounds__(kThreads<MT>, kBlocksPerSm<MT>) attend(const AttentionArgs a) {
    ptx::grid_launch_next();
    Shared<MT>& sm = *reinterpret_cast<Shared<MT>*>(ptx::shared_memory());
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    Part part{};
    part.rank = static_cast<int>(blockIdx.x) % 2;
    if (thread == 0) sm.init_barriers();
    if (thread < kSets * 4) sm.rescale[thread / 4][thread % 4] = 0;
    // The odd unit of the last mma step is zero for good; copies never touch it.
    if (Shape::columns(a, part.rank).units() % 2 != 0)
        for (int i = thread; i < kStages * kStepKeys * kMostUnits; i += kThreads<MT>)
            reinterpret_cast<uint4*>(sm.keys[0])[i] = make_uint4(0, 0, 0, 0);

    ptx::grid_wait();
    if (static_cast<int>(blockIdx.z) >= a.rows.live_count()) return;
    part.row = a.rows.first + static_cast<int>(blockIdx.z);
    part.head0 = static_cast<int>(blockIdx.y) * MT * 16;
    part.span = key_span(a.batch, part.row);
    const int2 splits = splits_of_block(static_cast<int>(blockIdx.x) / 2, a.blocks, part.span.count);
    if (splits.x >= splits.y) return;
    const int first_key = split_start(splits.x), end_key = min(split_start(splits.y), part.span.count);
    part.split = splits.x;
    part.step = first_key / kStepKeys;
    part.steps = (end_key - first_key + kStepKeys - 1) / kStepKeys;

    __syncthreads();
    // Queries pass through the last stages while the first keys travel; the cluster meets when they have been
    // taken up and the barriers of both blocks are ready.
    const int output_warp = warp - kScoreWarps<MT>;
    Loader<Shape, MT> loader(a, part, sm, output_warp, lane);
    if (output_warp >= 0) loader.begin();
    stage_queries<Shape, MT>(a, part, sm.keys[kFirstStages], thread);
    __syncthreads();
    if (output_warp >= 0)
        output<Shape>(a, part, sm, loader, output_warp, lane);
    else
        score<Shape>(a, part, sm, warp % MT, warp / MT, lane);
    __syncwarp();
    ptx::cluster_sync();  // the partner writes to this block's memory no more
}

template <int MT, class Shape>
void launch_as(const GemmLaunch& l, AttentionArgs args) {
    const int tiles = (args.heads + MT * 16 - 1) / (MT * 16);
    args.blocks = attention_blocks(args.rows.count * tiles, args.parts, l.machine.sms * kBlocksPerSm<MT> / 2);
    launch<attend<MT, Shape>>({l.stream, l.device, l.name, dim3(args.blocks * 2, tiles, args.rows.count),
                               kThreads<MT>, static_cast<int>(sizeof(Shared<MT>)), 2},
                              args);
}

}  // namespace

void launch_attend_bf16(const GemmLaunch& l, const AttentionArgs& args) {
    if (args.latent != 512 || args.rope != 64) return launch_as<4, AnyShape>(l, args);
    // A single row with few keys has few clusters: of 16 heads there are more, as long as each block has an
    // SM.
    const bool few_clusters =
        args.rows.count == 1 && 2 * args.parts * ((args.heads + 15) / 16) <= l.machine.sms;
    if (args.heads > 16 && !few_clusters) return launch_as<4, ReleasedShape>(l, args);
    launch_as<1, ReleasedShape>(l, args);
}

}  // namespace kdt::cuda
