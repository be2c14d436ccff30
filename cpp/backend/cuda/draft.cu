// The draft ops of the op table: arguments checked, work cut, kernels queued. A table's values (positions,
// pages) are on the device: a position without a page is skipped, and reads as zero.
#include "backend/cuda/draft.h"

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"

namespace kdt::cuda {

namespace {

constexpr size_t kPartialBytes = size_t{256} << 20;  // of one launch's splits

void check_heads(const char* op, int heads, int head_dim) {
    if (heads < 1 || head_dim < 2 || head_dim % 2 != 0 || head_dim > kMaxHeadDim)
        fail(ErrorCode::invalid_argument,
             "%s: %d heads of %d values; at least one head of an even number up to %d was expected", op,
             heads, head_dim, kMaxHeadDim);
}

// How a block's attention is cut: partial softmaxes of a row, and rows of one launch.
struct BlockCut {
    int parts, rows;
    size_t row_bytes;
};

BlockCut cut_block(int rows, int heads, int head_dim, int positions, int window) {
    BlockCut cut{block_parts(window, positions), 0, 0};
    cut.row_bytes = static_cast<size_t>(heads) * static_cast<size_t>(cut.parts) *
                    (static_cast<size_t>(head_dim) * sizeof(float) + sizeof(float2));
    cut.rows = static_cast<int>(
        std::clamp<size_t>(kPartialBytes / cut.row_bytes, 1, static_cast<size_t>(std::max(rows, 1))));
    return cut;
}

}  // namespace

void CudaBackend::keep_taps(const KeepTapsArgs& args) {
    launch_keep_taps(at("keep_taps"), args);
}

void CudaBackend::norm_rotate(const NormRotateArgs& args) {
    check_heads("norm_rotate", args.heads, args.rope.rope);
    launch_norm_rotate(at("norm_rotate"), args);
}

void CudaBackend::write_key_value(const WriteKeyValueArgs& args) {
    check_heads("write_key_value", args.kv_heads, args.rope.rope);
    if (args.to_block && args.rows.capacity > kMaxBlockRows)
        fail(ErrorCode::invalid_argument, "a block of %d rows; at most %d were expected", args.rows.capacity,
             kMaxBlockRows);
    launch_write_key_value(at("write_key_value"), args, bf16_);
}

void CudaBackend::reserve_block_attention(int rows, int heads, int head_dim, int positions, int window) {
    const BlockCut cut = cut_block(rows, heads, head_dim, positions, window);
    check(cudaSetDevice(device_), "the workspace of ops");
    workspace(static_cast<size_t>(cut.rows) * cut.row_bytes);
}

void CudaBackend::block_attend(const BlockAttendArgs& args) {
    check_heads("block_attend", args.kv_heads, args.head_dim);
    if (args.heads % args.kv_heads != 0)
        fail(ErrorCode::invalid_argument, "%d query heads share %d key heads; a multiple was expected",
             args.heads, args.kv_heads);
    if (args.block < 1 || args.block > kMaxBlockRows || args.window < 0)
        fail(ErrorCode::invalid_argument,
             "a block of %d entries and a window of %d; 1 to %d entries and no negative window were expected",
             args.block, args.window, kMaxBlockRows);
    const int rows = args.rows.capacity, positions = args.cache.pages_per_sequence * kPageSize + args.block;
    if (rows < 1) return;
    const GemmLaunch l = at("block_attend");
    const BlockCut cut = cut_block(rows, args.heads, args.head_dim, positions, args.window);
    unsigned char* const space = workspace(static_cast<size_t>(cut.rows) * cut.row_bytes);
    BlockAttentionArgs a{};
    a.position = args.position;
    a.start = args.start;
    a.sequence = args.sequence;
    a.q = args.q;
    a.cache = args.cache;
    a.heads = args.heads;
    a.kv_heads = args.kv_heads;
    a.head_dim = args.head_dim;
    a.block = args.block;
    a.window = args.window;
    a.causal = args.causal;
    a.splits = BlockSplits::of_window(args.window);
    a.scale_log2 = args.scale * kLog2E;
    a.parts = cut.parts;
    a.out = args.out;
    a.state = reinterpret_cast<float2*>(space);
    a.part =
        reinterpret_cast<float*>(a.state + static_cast<size_t>(cut.rows) * static_cast<size_t>(args.heads) *
                                               static_cast<size_t>(cut.parts));
    for (int first = 0; first < rows; first += cut.rows) {
        a.rows = {args.rows.live, first, std::min(cut.rows, rows - first)};
        if (bf16_ && block_attend_has_tensor_cores(args.head_dim))
            launch_block_attend_bf16(l, a);
        else
            launch_block_attend_fma(l, a, bf16_);
        launch_block_merge(l, a);
    }
}

}  // namespace kdt::cuda
