// The op table: arguments checked, work cut, kernels queued. Nothing here allocates, waits or touches host
// memory once the workspace is as large as it must be, so every op can be captured into a graph.
#include <algorithm>
#include <cmath>

#include "backend/cuda/cuda_backend.h"
#include "backend/cuda/launch.h"
#include "backend/cuda/router.h"
#include "backend/cuda/rows.h"
#include "backend/cuda/sampling.h"
#include "backend/cuda/tree.h"

namespace kdt::cuda {

namespace {

constexpr int kDenseRows = 4096;  // rows of one dense launch: bounds its grid
constexpr size_t kAttentionBytes = size_t{256} << 20;
constexpr int kMaxLatent = 512, kMaxWidth = 576;  // of the tensor-core attention
constexpr int kMaxLatentF32 = 1024;
constexpr size_t kAlign = 256;

size_t aligned(size_t bytes) {
    return (bytes + kAlign - 1) / kAlign * kAlign;
}

bool f32_scales(const Weight& w) {
    return w.kind == WeightKind::w4a16 && w.scale_dtype == DType::f32;
}

// The part of GemmArgs that a matrix fixes.
GemmArgs of_matrix(const Weight& w) {
    GemmArgs a{};
    a.in = w.in;
    a.out = w.out;
    a.heads = 1;
    a.w[0] = static_cast<const unsigned char*>(w.data);
    a.k_blocks = column_blocks(w.in);
    a.f32_scales = f32_scales(w);
    a.block_bytes = block_bytes(w.kind, a.f32_scales);
    return a;
}

void set_input(GemmArgs& a, const float* x, long long stride, int head_stride) {
    a.x = x;
    a.x_stride = stride;
    a.x_head_stride = head_stride;
    a.wide =
        a.in % 8 == 0 && stride % 4 == 0 && head_stride % 4 == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
}

void set_output(GemmArgs& a, float* y, long long stride, int head_stride, Store store) {
    a.y = y;
    a.y_stride = stride;
    a.y_head_stride = head_stride;
    a.store = store;
}

// Attention's cut for up to `rows` rows and `keys` keys: parts, and rows of one launch.
struct AttentionCut {
    int parts, rows;
    size_t row_bytes;

    size_t bytes() const { return static_cast<size_t>(rows) * row_bytes + aligned(1); }
};

AttentionCut cut_attention(int rows, int keys, int heads, int latent) {
    AttentionCut cut{attention_parts(keys), 0, 0};
    cut.row_bytes = static_cast<size_t>(heads) * static_cast<size_t>(cut.parts) *
                    (static_cast<size_t>(latent) * sizeof(float) + kStateSets * sizeof(float2));
    cut.rows = static_cast<int>(std::clamp<size_t>(kAttentionBytes / cut.row_bytes, 1,
                                                   static_cast<size_t>(std::min(rows, kAttentionRows))));
    return cut;
}

void check_vocabulary(int vocab) {
    if (vocab < 1 || vocab > 1 << 20)
        fail(ErrorCode::unsupported, "a vocabulary of %d tokens; 1 to %d were expected", vocab, 1 << 20);
}

size_t experts_bytes(int rows, int top_k, int experts, int hidden, int intermediate) {
    const size_t pairs = static_cast<size_t>(rows) * static_cast<size_t>(top_k);
    return aligned(pairs * static_cast<size_t>(intermediate) * 4) +
           aligned(pairs * static_cast<size_t>(hidden) * 4) +
           aligned((2 * static_cast<size_t>(experts) + 2 + pairs) * 4);
}

}  // namespace

GemmLaunch CudaBackend::at(const char* op) {
    check(cudaSetDevice(device_), op);
    return {line_ == 0 ? stream_ : aside_stream_, device_, op, machine_};
}

void CudaBackend::reserve(int line, size_t bytes) {
    if (bytes <= workspace_bytes_[line]) return;
    // Graphs that were recorded before go on using the old one: it stays until the end.
    auto* const larger = static_cast<unsigned char*>(allocate(bytes, "the workspace of ops"));
    if (workspace_[line] != nullptr) outgrown_workspaces_.push_back(workspace_[line]);
    workspace_[line] = larger;
    workspace_bytes_[line] = bytes;
}

unsigned char* CudaBackend::workspace(size_t bytes) {
    reserve(line_, bytes);
    return workspace_[line_];
}

void CudaBackend::aside(const std::function<void()>& ops) {
    if (line_ != 0) fail(ErrorCode::internal, "ops aside of ops aside");
    check(cudaSetDevice(device_), "ops aside");
    check(cudaEventRecord(forked_, stream_), "ops aside");
    check(cudaStreamWaitEvent(aside_stream_, forked_), "ops aside");
    line_ = 1;
    try {
        ops();
    } catch (...) {
        line_ = 0;
        cudaEventRecord(aside_done_, aside_stream_);
        cudaStreamWaitEvent(stream_, aside_done_);
        cudaGetLastError();  // what went wrong first is what is told
        throw;
    }
    line_ = 0;
    check(cudaEventRecord(aside_done_, aside_stream_), "ops aside");
    aside_pending_ = true;
}

void CudaBackend::join_aside() {
    if (!aside_pending_) return;
    aside_pending_ = false;
    check(cudaStreamWaitEvent(stream_, aside_done_), "ops aside");
}

void CudaBackend::reserve_workspace(const WorkspaceSizes& s) {
    size_t bytes = aligned(static_cast<size_t>(s.rows) * static_cast<size_t>(s.experts) * 4);
    const size_t rounded =  // heads are rounded up to whole blocks of columns each
        bf16_ && s.rows > kFewRows
            ? rounded_bytes(std::min(s.rows, kDenseRows), 1, s.widest + std::max(s.heads, 1) * kBlockColumns)
            : 0;
    bytes = std::max(bytes, rounded);
    if (s.experts > 0)
        bytes = std::max(bytes, experts_bytes(std::min(s.rows, kExpertRows), s.top_k, s.experts, s.hidden,
                                              s.intermediate));
    if (s.rows > 0 && s.heads > 0 && s.latent > 0) {
        const AttentionCut cut = cut_attention(s.rows, s.positions + kMaxAncestors, s.heads, s.latent);
        bytes = std::max(bytes, cut.bytes());
    }
    check(cudaSetDevice(device_), "the workspace of ops");
    reserve(0, bytes);
    reserve(1, rounded);
}

void CudaBackend::product(const char* op, WeightKind kind, const GemmArgs& args, int experts) {
    const GemmLaunch l = at(op);
    GemmArgs a = args;
    const int last = args.rows.first + args.rows.count;
    for (int first = args.rows.first; first < last; first += kDenseRows) {
        a.rows.first = first;
        a.rows.count = std::min(kDenseRows, last - first);
        if (!bf16_) {
            launch_fma_gemm(l, kind, a, experts);
            continue;
        }
        if (a.rows.count > few_rows(kind, a.out, a.heads, a.store == Store::gated, a.in, machine_)) {
            void* const rounded = workspace(rounded_bytes(a.rows.count, a.heads, a.in));
            launch_round_activations(l, a, rounded);
            a.rounded = rounded;
        }
        launch_gemm(l, kind, a, experts);
    }
}

void CudaBackend::embed(const EmbedArgs& args) {
    if (args.table.kind == WeightKind::w4a16)
        fail(ErrorCode::unsupported, "an embedding table of INT4 weights; f32 or bf16 was expected");
    launch_embed(at("embed"), args);
}

void CudaBackend::rms_norm(const RmsNormArgs& args) {
    launch_rms_norm(at("rms_norm"), args);
}

void CudaBackend::linear(const LinearArgs& args) {
    GemmArgs a = of_matrix(args.w);
    a.rows = {args.rows.live, 0, args.rows.capacity};
    set_input(a, args.x, args.w.in, 0);
    set_output(a, args.y, args.w.out, 0, args.accumulate ? Store::add : Store::write);
    product("linear", args.w.kind, a, 0);
}

void CudaBackend::gated_linear(const GatedLinearArgs& args) {
    const Weight &gate = args.gate, &up = args.up;
    if (gate.out != up.out || gate.in != up.in)
        fail(ErrorCode::invalid_argument, "gate is [%d, %d] and up [%d, %d]; one shape was expected",
             gate.out, gate.in, up.out, up.in);
    GemmArgs a = of_matrix(gate);
    a.rows = {args.rows.live, 0, args.rows.capacity};
    set_input(a, args.x, gate.in, 0);
    if (gate.kind == up.kind && f32_scales(gate) == f32_scales(up)) {
        a.w[1] = static_cast<const unsigned char*>(up.data);
        set_output(a, args.y, gate.out, 0, Store::gated);
        product("gated_linear", gate.kind, a, 0);
        return;
    }
    set_output(a, args.y, gate.out, 0, Store::write);
    product("gated_linear", gate.kind, a, 0);
    GemmArgs b = of_matrix(up);
    b.rows = a.rows;
    set_input(b, args.x, up.in, 0);
    set_output(b, args.y, up.out, 0, Store::gate);
    product("gated_linear", up.kind, b, 0);
}

void CudaBackend::write_latent(const WriteLatentArgs& args) {
    launch_write_latent(at("write_latent"), args, bf16_);
}

void CudaBackend::absorb_query(const AbsorbQueryArgs& args) {
    const Weight& w = args.key_up;
    if (w.out != args.heads * args.latent || w.in != args.nope)
        fail(ErrorCode::invalid_argument, "key_up is [%d, %d]; [%d * %d, %d] was expected", w.out, w.in,
             args.heads, args.latent, args.nope);
    const int rope = args.rope.rope;
    GemmArgs a = of_matrix(w);
    a.rows = {args.rows.live, 0, args.rows.capacity};
    a.heads = args.heads;
    a.out = args.latent;
    set_input(a, args.q, static_cast<long long>(args.heads) * (args.nope + rope), args.nope + rope);
    set_output(a, args.out, static_cast<long long>(args.heads) * (args.latent + rope), args.latent + rope,
               Store::write);
    aside([&] { launch_rope_query(at("absorb_query"), args); });
    product("absorb_query", w.kind, a, 0);
    join_aside();
}

void CudaBackend::attend(const AttendArgs& args) {
    const int width = args.latent + args.rope;
    if (bf16_ && (width % 8 != 0 || args.latent % 8 != 0 || args.latent > kMaxLatent || width > kMaxWidth))
        fail(ErrorCode::unsupported,
             "latents of %d + %d values; on CUDA in bf16 both are multiples of 8, at most %d and %d together",
             args.latent, args.rope, kMaxLatent, kMaxWidth);
    if (!bf16_ && args.latent > kMaxLatentF32)
        fail(ErrorCode::unsupported, "latents of %d values; at most %d were expected", args.latent,
             kMaxLatentF32);
    const int rows = args.rows.capacity, keys = args.cache.pages_per_sequence * kPageSize + kMaxAncestors;
    if (rows < 1) return;
    const GemmLaunch l = at("attend");
    const AttentionCut cut = cut_attention(rows, keys, args.heads, args.latent);
    unsigned char* const space = workspace(cut.bytes());
    AttentionArgs a{};
    a.batch = args.batch;
    a.cache = args.cache;
    a.q = args.q;
    a.heads = args.heads;
    a.latent = args.latent;
    a.rope = args.rope;
    a.scale_log2 = args.scale * kLog2E;
    a.parts = cut.parts;
    a.out = args.out;
    a.state = reinterpret_cast<float2*>(space);
    a.part = reinterpret_cast<float*>(
        space + aligned(static_cast<size_t>(cut.rows) * static_cast<size_t>(args.heads) *
                        static_cast<size_t>(cut.parts) * kStateSets * sizeof(float2)));
    for (int first = 0; first < rows; first += cut.rows) {
        a.rows = {args.rows.live, first, std::min(cut.rows, rows - first)};
        if (bf16_)
            launch_attend_bf16(l, a);
        else
            launch_attend_f32(l, a);
        launch_attend_merge(l, a);
    }
}

void CudaBackend::project_value(const ProjectValueArgs& args) {
    const Weight& w = args.value_up;
    if (w.out != args.heads * args.v || w.in != args.latent)
        fail(ErrorCode::invalid_argument, "value_up is [%d, %d]; [%d * %d, %d] was expected", w.out, w.in,
             args.heads, args.v, args.latent);
    GemmArgs a = of_matrix(w);
    a.rows = {args.rows.live, 0, args.rows.capacity};
    a.heads = args.heads;
    a.out = args.v;
    set_input(a, args.o, static_cast<long long>(args.heads) * args.latent, args.latent);
    set_output(a, args.out, static_cast<long long>(args.heads) * args.v, args.v, Store::write);
    product("project_value", w.kind, a, 0);
}

void CudaBackend::route(const RouteArgs& args) {
    const int experts = args.gate.out;
    if (experts > kMaxExperts)
        fail(ErrorCode::unsupported, "%d experts; the router takes up to %d", experts, kMaxExperts);
    if (args.groups < 1 || experts % args.groups != 0 || args.top_groups < 1 || args.top_groups > args.groups)
        fail(ErrorCode::invalid_argument, "%d experts in %d groups, %d of them chosen, do not go together",
             experts, args.groups, args.top_groups);
    if (args.top_k < 1 || args.top_k > kMaxTopK || args.top_k > experts / args.groups * args.top_groups)
        fail(ErrorCode::invalid_argument, "%d experts of %d per row were asked for", args.top_k,
             experts / args.groups * args.top_groups);
    if (args.scoring == Scoring::sigmoid_noaux_tc && args.bias == nullptr)
        fail(ErrorCode::invalid_argument, "the sigmoid router has no correction bias");
    const GemmLaunch l = at("route");
    float* const logits = reinterpret_cast<float*>(
        workspace(static_cast<size_t>(args.rows.capacity) * static_cast<size_t>(experts) * 4));
    if (has_router_kernel(args.gate)) {
        launch_router_logits(l, args, logits);
    } else {
        GemmArgs a = of_matrix(args.gate);
        a.rows = {args.rows.live, 0, args.rows.capacity};
        set_input(a, args.x, args.gate.in, 0);
        set_output(a, logits, experts, 0, Store::write);
        launch_fma_gemm(l, args.gate.kind, a, 0);
    }
    launch_route(l, args, logits);
}

void CudaBackend::experts(const ExpertsArgs& args) {
    if (args.experts.table == nullptr) fail(ErrorCode::internal, "a layer without experts");
    const Experts& e = *static_cast<const Experts*>(args.experts.table);
    const int count = args.experts.count, hidden = args.experts.hidden, inner = args.experts.intermediate;
    const int slice = std::min(args.rows.capacity, kExpertRows);
    if (slice < 1) return;
    const GemmLaunch l = at("experts");
    unsigned char* const space = workspace(experts_bytes(slice, args.top_k, count, hidden, inner));
    const size_t pairs = static_cast<size_t>(slice) * static_cast<size_t>(args.top_k);
    float* const act = reinterpret_cast<float*>(space);
    float* const down = reinterpret_cast<float*>(space + aligned(pairs * static_cast<size_t>(inner) * 4));
    int32_t* const ints = reinterpret_cast<int32_t*>(reinterpret_cast<unsigned char*>(down) +
                                                     aligned(pairs * static_cast<size_t>(hidden) * 4));
    const PairLists lists{ints, ints + 1, ints + 1 + count, ints + 2 + 2 * count};
    const bool few = bf16_ && pairs <= kChosenPairs;
    const int blocks = static_cast<int>(few ? pairs : std::min<size_t>(static_cast<size_t>(count), pairs));
    const auto with_pairs = [&](GemmArgs& a, const void* const* first, const void* const* second) {
        a.table[0] = first;
        a.table[1] = second;
        a.top_k = args.top_k;
        if (few) {
            a.chosen = args.expert;
            return;
        }
        a.active_count = lists.active_count;
        a.active = lists.active;
        a.offset = lists.offset;
        a.pairs = lists.pairs;
    };
    for (int first = 0; first < args.rows.capacity; first += slice) {
        const RowSpan rows{args.rows.live, first, std::min(slice, args.rows.capacity - first)};
        if (!few) launch_group_pairs(l, rows, args.top_k, count, args.expert, lists);

        GemmArgs gate = of_matrix(e.gate_like);
        gate.rows = rows;
        with_pairs(gate, e.gate, e.up);
        gate.x_first = first;
        gate.pair_divisor = args.top_k;
        gate.usual_tokens = (rows.count * args.top_k + count - 1) / count;
        set_input(gate, args.x, hidden, 0);
        set_output(gate, act, inner, 0, Store::gated);

        GemmArgs out = of_matrix(e.down_like);
        out.rows = rows;
        with_pairs(out, e.down, e.down);
        out.routed = true;
        out.x_first = 0;
        out.pair_divisor = 1;
        out.usual_tokens = gate.usual_tokens;
        set_input(out, act, inner, 0);
        set_output(out, down, hidden, 0, Store::write);
        if (bf16_) {
            launch_gemm(l, e.gate_like.kind, gate, blocks);
            launch_gemm(l, e.down_like.kind, out, blocks);
        } else {
            launch_fma_gemm(l, e.gate_like.kind, gate, blocks);
            launch_fma_gemm(l, e.down_like.kind, out, blocks);
        }
        join_aside();
        launch_combine(l, {rows, args.top_k, hidden, args.weight, down, args.shared, args.y});
    }
}

void CudaBackend::gather_rows(const GatherRowsArgs& args) {
    launch_gather_rows(at("gather_rows"), args);
}

void CudaBackend::top_k(const TopKArgs& args) {
    check_vocabulary(args.vocab);
    if (args.k < 1 || args.k > args.vocab || args.k > kMaxTopTokens)
        fail(ErrorCode::invalid_argument, "the %d best of %d tokens were asked for; 1 to %d are possible",
             args.k, args.vocab, std::min(args.vocab, kMaxTopTokens));
    launch_top_k(at("top_k"), args);
}

void CudaBackend::select(const SelectArgs& args) {
    check_vocabulary(args.vocab);
    launch_select(at("select"), args);
}

void CudaBackend::build_tree(const BuildTreeArgs& args) {
    if (args.budget < 0 || args.budget > kMaxNodes || args.max_depth < 0 || args.max_depth > kMaxDepth)
        fail(ErrorCode::invalid_argument, "a tree of %d nodes and depth %d; at most %d and %d were expected",
             args.budget, args.max_depth, kMaxNodes, kMaxDepth);
    if (args.proposal.table_depth != nullptr && args.proposal.table_width > kMaxTableWidth)
        fail(ErrorCode::invalid_argument, "the draft table's width is %d; 1 to %d was expected",
             args.proposal.table_width, kMaxTableWidth);
    if (args.proposal.path_count != nullptr && args.proposal.max_paths > kMaxDraftPaths)
        fail(ErrorCode::unsupported, "%d draft paths; at most %d were expected", args.proposal.max_paths,
             kMaxDraftPaths);
    launch_build_tree(at("build_tree"), args);
}

void CudaBackend::tree_rows(const TreeRowsArgs& args) {
    launch_tree_rows(at("tree_rows"), args);
}

void CudaBackend::accept(const AcceptArgs& args) {
    launch_accept(at("accept"), args);
}

void CudaBackend::commit(const CommitArgs& args) {
    launch_commit(at("commit"), args, bf16_);
}

}  // namespace kdt::cuda
