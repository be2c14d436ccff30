// The op table: everything that a device does for the model, the drafters and the round.
//
// One class, one method an op, one parameter struct per op with the shape of every pointer. Pointers named
// here are *device* pointers: host code allocates, uploads and downloads through the same interface and never
// dereferences them. Ops are ordered on one stream, but for those issued through `aside`; `synchronize` waits
// for it and for what has joined it. Nothing here knows a model: sizes come with each call.
//
// Row purity (law 1) holds for every op: row i of an output is a function of row i's inputs, of the weights
// and of constants; never of `rows`, of other rows, of padding, of threads or SMs. docs/numerics.md fixes
// each op's order of operations.
//
// Activations are float32 on the CPU; `activation_dtype()` says what a backend uses. Pointers to activations
// are `float*` where every backend uses float32, and `void*` where the element type is `activation_dtype()`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/limits.h"

namespace kdt {

// ----------------------------------------------------------------------------------------------------------------
// weights

enum class WeightKind : uint8_t { f32, bf16, w4a16 };

// A matrix [out, in] in host memory as files store it, row-major. For w4a16 `data` is int32 [out, in / 8],
// eight nibbles a word along the input dimension, lowest nibble first, value = (nibble - 8) * scale; `scales`
// is [out, in / 32].
struct HostMatrix {
    WeightKind kind = WeightKind::f32;
    int out = 0;
    int in = 0;
    const void* data = nullptr;
    const void* scales = nullptr;    // w4a16 only
    DType scale_dtype = DType::f32;  // f32 or bf16
};

// A matrix in the backend's own layout. Owned by the backend that uploaded it, for the backend's lifetime.
struct Weight {
    WeightKind kind = WeightKind::f32;
    int out = 0;
    int in = 0;
    const void* data = nullptr;
    const void* scales = nullptr;
    DType scale_dtype = DType::f32;
    explicit operator bool() const { return data != nullptr; }
};

// Bytes of a matrix's values and scales, without what a layout adds.
size_t matrix_bytes(const Weight& weight);

// The routed experts of one layer. `table` is whatever the backend built from them in `make_experts`.
struct ExpertSet {
    int count = 0;
    int hidden = 0;        // input of gate and up, output of down
    int intermediate = 0;  // output of gate and up, input of down
    const void* table = nullptr;
};

// ----------------------------------------------------------------------------------------------------------------
// rows

// How many rows an op runs over. `capacity` is what the launch is shaped for; `*live` (a device scalar, <=
// capacity) is how many exist. Rows past `*live` are padding: they read nothing, choose no expert and write
// nothing.
struct Rows {
    int capacity = 0;
    const int32_t* live = nullptr;
};

// What a row is (law 3): device arrays of `Rows::capacity` entries each.
//   A prompt row writes its latent straight to its page and sees `prefix` = position + 1 committed positions.
//   A tree row writes its latent to scratch row i (its own row number), sees the committed `prefix` (the same
//   for the whole tree) and then `ancestors[i][0 .. ancestor_count[i])`, scratch rows from the root down to
//   itself.
struct RowBatch {
    int32_t* token = nullptr;           // [R] token id
    int32_t* sequence = nullptr;        // [R] row of the page table
    int32_t* position = nullptr;        // [R] absolute position: RoPE angle; page slot of a prompt row
    int32_t* prefix = nullptr;          // [R] committed positions visible to this row
    int32_t* ancestor_count = nullptr;  // [R] 0: a prompt row
    int32_t* ancestors = nullptr;       // [R, kMaxAncestors] scratch rows, root first, itself last
};

// The latent cache of one layer. Position p of sequence s lives in page page_table[s, p / kPageSize], slot p
// % kPageSize.
struct LatentCache {
    void* pages = nullptr;                // [page_count, kPageSize, latent + rope], dtype of the cache
    void* scratch = nullptr;              // [scratch rows, latent + rope]
    const int32_t* page_table = nullptr;  // [sequences, pages_per_sequence]; -1 where there is no page
    int page_count = 0;
    int pages_per_sequence = 0;
};

// ----------------------------------------------------------------------------------------------------------------
// model ops

struct EmbedArgs {  // y[i] = table[token[i]], widened to the residual's dtype
    Rows rows;
    const int32_t* token;  // [R]
    Weight table;          // [vocab, hidden], f32 or bf16
    float* y;              // [R, hidden]
};

struct RmsNormArgs {  // y[i] = x[i] * rsqrt(mean(x[i]^2) + eps) * weight
    Rows rows;
    const float* x;  // [R, x_stride], the first `width` of each row
    int x_stride;
    const float* weight;  // [width]
    float eps;
    int width;
    float* y;  // [R, width]; may be x when x_stride == width
    // Where x goes as it is, too: [R, copy_stride], the first `width` of each row; null: nowhere.
    float* copy = nullptr;
    int copy_stride = 0;
};

struct LinearArgs {  // y[i] = x[i] . w^T, or y[i] += x[i] . w^T
    Rows rows;
    const float* x;   // [R, w.in]
    Weight w;         // [out, in]
    float* y;         // [R, w.out]
    bool accumulate;  // add to y (the residual stream) instead of writing it
};

struct GatedLinearArgs {  // y[i] = silu(x[i] . gate^T) * (x[i] . up^T)
    Rows rows;
    const float* x;  // [R, in]
    Weight gate;     // [out, in]
    Weight up;       // [out, in]
    float* y;        // [R, out]
};

// RoPE reads angles from a table: cos and sin of position p, pair j at [p, j]. `interleaved` pairs (2j, 2j +
// 1); otherwise pairs (j, j + rope / 2). The result stays in the stored order, for q and k alike.
struct RopeTable {
    const float* cos = nullptr;  // [positions, rope / 2]
    const float* sin = nullptr;  // [positions, rope / 2]
    int rope = 0;
    int positions = 0;
    bool interleaved = true;
};

struct WriteLatentArgs {  // cache <- [rms_norm(ckv[:latent]) | rope(ckv[latent:])], rounded to the cache's
                          // dtype once
    Rows rows;
    RowBatch batch;
    const float* ckv;     // [R, latent + rope]
    const float* weight;  // [latent] kv_a_layernorm
    float eps;
    int latent;
    RopeTable rope;
    LatentCache cache;
};

struct AbsorbQueryArgs {  // out[i, h] = [q_nope[i, h] . key_up[h] | rope(q_rope[i, h])]
    Rows rows;
    RowBatch batch;  // positions
    const float* q;  // [R, heads, nope + rope]
    Weight key_up;   // [heads * latent, nope]: row h * latent + c holds kv_b's K rows of head h, transposed
    int heads, nope, latent;
    RopeTable rope;
    float* out;  // [R, heads, latent + rope]
};

struct AttendArgs {  // softmax over the row's virtual key sequence: committed prefix, then ancestors by depth
    Rows rows;
    RowBatch batch;
    const float* q;  // [R, heads, latent + rope]
    LatentCache cache;
    int heads, latent, rope;
    float scale;  // of q . k
    float* out;   // [R, heads, latent]
};

struct ProjectValueArgs {  // out[i, h] = o[i, h] . value_up[h]^T
    Rows rows;
    const float* o;   // [R, heads, latent]
    Weight value_up;  // [heads * v, latent]: row h * v + j
    int heads, latent, v;
    float* out;  // [R, heads * v]
};

enum class Scoring : uint8_t { sigmoid_noaux_tc, softmax_greedy };

struct RouteArgs {  // top-k experts of each row, best first; ties: lower id
    Rows rows;
    const float* x;     // [R, hidden]
    Weight gate;        // [experts, hidden]
    const float* bias;  // [experts] e_score_correction_bias; null for softmax_greedy
    Scoring scoring;
    int top_k, groups, top_groups;  // groups = 1: no group step
    bool normalize;                 // divide by (sum + 1e-20)
    float scaling;                  // routed_scaling_factor, applied last, always
    int32_t* expert;                // [R, top_k]
    float* weight;                  // [R, top_k]
};

struct ExpertsArgs {  // y[i] += (sum over slots, in slot order, of weight * down(silu(gate x) * up x)) +
                      // shared[i]
    Rows rows;
    const float* x;  // [R, hidden]
    ExpertSet experts;
    const int32_t* expert;  // [R, top_k]
    const float* weight;    // [R, top_k]
    int top_k;
    const float* shared;  // [R, hidden], output of the shared expert; may be null; joined if it comes aside
    float* y;             // [R, hidden] residual stream
};

struct GatherRowsArgs {    // y[j] = x[index[j]]
    Rows rows;             // of y
    const int32_t* index;  // [rows]
    const float* x;        // [*, width]
    int width;
    float* y;  // [rows, y_stride]
    int y_stride;
};

// ----------------------------------------------------------------------------------------------------------------
// draft ops

// A Proposal on the device. A table of per-position distributions and any number of weighted paths; either
// may be empty.
struct ProposalArrays {
    int32_t* table_depth = nullptr;  // scalar: L, positions in use (<= kMaxTableDepth)
    int32_t* table_token = nullptr;  // [kMaxTableDepth, table_width]
    float* table_logp = nullptr;     // [kMaxTableDepth, table_width], each row in descending order
    int table_width = 0;             // K <= kMaxTableWidth
    int32_t* path_count = nullptr;   // scalar
    int32_t* path_length = nullptr;  // [max_paths]
    int32_t* path_token = nullptr;   // [max_paths, kMaxDepth]
    float* path_logp = nullptr;      // [max_paths, kMaxDepth] log-probability of each step
    int max_paths = 0;
};

// A tree on the device, nodes in pop order, node 0 the root. Entry i is written for i <= count.
struct TreeArrays {
    int32_t* count = nullptr;   // scalar: nodes, the root not counted
    int32_t* token = nullptr;   // [kMaxTreeRows]
    int32_t* parent = nullptr;  // [kMaxTreeRows]; -1 for the root
    int32_t* depth = nullptr;   // [kMaxTreeRows]; 0 for the root
    int32_t* source = nullptr;  // [kMaxTreeRows] bit 0: table, bit 1: path
    double* weight = nullptr;   // [kMaxTreeRows] sum of log-probabilities; 0 for the root
};

struct BuildTreeArgs {  // best-first over the union of the table's and the paths' prefixes (design:
                        // ddtree/build.h)
    ProposalArrays proposal;
    int budget;           // nodes at most
    int max_depth;        // of a node
    int vocab;            // a token outside 0 .. vocab - 1 ends its table row or path
    const int32_t* root;  // scalar: token of the root
    TreeArrays tree;
};

struct TreeRowsArgs {  // rows of the first min(*nodes, *tree.count) + 1 nodes
    TreeArrays tree;
    const int32_t* nodes;     // scalar: the budget's choice n
    const int32_t* sequence;  // scalar: row of the page table
    const int32_t* start;     // scalar: committed length = position of the root
    RowBatch batch;
    int32_t* live;  // scalar out: rows
};

struct TopKArgs {  // top-k log-probabilities (log-softmax over the full row, temperature 1), descending,
                   // ties: lower id
    Rows rows;
    const float* logits;  // [R, vocab]
    int vocab, k;
    int32_t* token;  // [R, k]
    float* logp;     // [R, k]
};

struct SampleParams {
    float temperature = 0.0f;  // 0: greedy
    int32_t top_k = 0;         // 0: off
    float top_p = 1.0f;        // 1: off
    float min_p = 0.0f;        // 0: off
    uint64_t seed = 0;
    uint32_t choice = 0;  // index of the choice within one request
};

struct SelectArgs {  // the token that the target emits after each row; -1 where the row's logits hold a NaN
                     // or no finite value
    Rows rows;
    const float* logits;  // [R, vocab]
    int vocab;
    const int32_t* position;     // [R] of the row; the emitted token's position is one more
    const SampleParams* sample;  // one, on the device: a captured graph serves every request
    int32_t* token;              // [R]
};

struct AcceptArgs {  // walk from the root while the target's token is a child; cut where plain decoding ends
    TreeArrays tree;
    const int32_t* live;        // scalar: rows verified
    const int32_t* selected;    // [kMaxTreeRows] target token after each row; -1: none could be chosen
    const int32_t* limit;       // scalar: tokens that may still be emitted, >= 1 (max_tokens and the context)
    const int32_t* stop_count;  // scalar: <= kMaxStops
    const int32_t* stops;       // [kMaxStops] a token among these ends the walk
    int32_t* length;            // scalar out: tokens emitted, which is also the number of rows to commit
    int32_t* failed;            // scalar out: 1 where the walk reached a row with no token before it was cut
    int32_t* path;              // [kMaxTreeRows] out: rows, root first; `length` of them
    int32_t* emitted;           // [kMaxTreeRows] out: the token after each of them
};

// Scratch latents of path[j] -> position start + j of the sequence, in every layer. The layers' caches lie at
// a constant distance and share the page table.
struct CommitArgs {
    const int32_t* length;    // scalar: rows to keep
    const int32_t* path;      // [kMaxTreeRows] scratch rows
    const int32_t* start;     // scalar: first position
    const int32_t* sequence;  // scalar: row of the page table
    int width;                // latent + rope
    LatentCache cache;        // of the first layer
    int layers;
    size_t page_distance;     // bytes from one layer's pages to the next layer's
    size_t scratch_distance;  // the same of scratch
};

// ----------------------------------------------------------------------------------------------------------------
// draft model ops: block diffusion (DFlash, arXiv 2602.06036). Grouped-query attention whose keys and values
// of committed positions come from features of the target, and of the block's rows from the block itself.

struct KeepTapsArgs {       // kept[*first + j] = taps[path[j]] for j < *length
    const int32_t* length;  // scalar
    const int32_t* path;    // [*length] rows of taps
    const int32_t* first;   // scalar: row of `kept`
    int capacity;           // rows of `kept`
    int width;
    const float* taps;  // [kMaxTreeRows, width]
    float* kept;        // [capacity, width]
};

// Keys and values of one draft layer. An entry is [keys of all heads | values of all heads]. Position p of
// sequence s lies in page page_table[s, p / kPageSize], slot p % kPageSize: the target's own page table.
struct DraftCache {
    void* pages = nullptr;  // [page_count, kPageSize, 2, kv_heads, head_dim], dtype of the cache
    void* block = nullptr;  // [kMaxBlockRows, 2, kv_heads, head_dim]
    const int32_t* page_table = nullptr;  // [sequences, pages_per_sequence]; -1 where there is no page
    int page_count = 0;
    int pages_per_sequence = 0;
};

struct NormRotateArgs {  // out[i, h] = rope(rms_norm(x[i, h])), over head_dim = rope.rope values
    Rows rows;
    const int32_t* position;  // [R]
    const float* x;           // [R, heads, head_dim]
    const float* weight;      // [head_dim]
    float eps;
    int heads;
    RopeTable rope;
    float* out;  // [R, heads, head_dim]; may be x
};

struct WriteKeyValueArgs {  // cache <- [rope(rms_norm(k[i, h])) | v[i]], rounded to the cache's dtype once
    Rows rows;
    const int32_t* position;  // [R]: angle, and page slot where the row does not go to the block
    const int32_t* sequence;  // scalar: row of the page table
    bool to_block;            // row i becomes entry i of the block
    const float* k;           // [R, kv_heads, head_dim]
    const float* v;           // [R, kv_heads, head_dim]
    const float* weight;      // [head_dim] of the keys' norm
    float eps;
    int kv_heads;
    RopeTable rope;
    DraftCache cache;
};

// softmax over committed positions 0 .. *start - 1, then the block's entries, which stand at positions *start
// + j. A row at position p sees keys at distance |p - key| < window (0: no limit), and with `causal` none
// past itself. Chunks and order as in `attend`, over absolute positions; a row that sees no key is refused.
struct BlockAttendArgs {
    Rows rows;
    const int32_t* position;  // [R] absolute
    const int32_t* start;     // scalar: committed positions
    const int32_t* sequence;  // scalar: row of the page table
    const float* q;           // [R, heads, head_dim]
    DraftCache cache;
    int heads, kv_heads, head_dim;  // query heads of group g share key head g
    int block;                      // entries of the block, a constant of the model
    int window;
    bool causal;
    float scale;  // of q . k
    float* out;   // [R, heads, head_dim]
};

// ----------------------------------------------------------------------------------------------------------------
// backend

// A recorded queue of ops. Between launches the contents of device memory may change (scalars, rows, caches);
// pointers, capacities and host-side arguments are those of the recording.
class Graph {
  public:
    virtual ~Graph() = default;
    virtual void launch() = 0;
};

class Backend {
  public:
    virtual ~Backend() = default;

    virtual std::string name() const = 0;  // "cpu" or "cuda"
    virtual std::string description()
        const = 0;  // device, instruction set, threads: for people and for records
    virtual DType activation_dtype() const = 0;
    virtual DType cache_dtype() const = 0;

    // Memory. `what` names the buffer in the out-of-memory message. Fresh memory is filled with 0xFF bytes
    // (NaN) in tests.
    virtual void* allocate(size_t bytes, const char* what) = 0;
    virtual void release(void* pointer) = 0;
    // Host memory that crosses fastest: page-locked where there is a link to cross. Uploads of it are
    // asynchronous.
    virtual void* allocate_host(size_t bytes, const char* what);
    virtual void release_host(void* pointer);
    virtual void upload(void* device, const void* host, size_t bytes) = 0;
    virtual void download(void* host, const void* device, size_t bytes) = 0;
    virtual void fill(void* device, int byte, size_t bytes) = 0;
    virtual void synchronize() = 0;
    // Bytes that `allocate` can still hand out, as far as the device tells.
    virtual size_t memory_available() const { return SIZE_MAX; }
    // For reports, never for results. Bytes per second at which `bytes` of fresh device memory are read once,
    // the fastest of `passes`; the size of the last cache in front of that memory, 0 where it is not known.
    virtual double read_rate(size_t bytes, int passes) = 0;
    virtual size_t last_level_cache() const = 0;
    // Records the ops that `ops` issues; nothing runs before `launch`. The default keeps the calls and makes
    // them again; a device with graphs captures them. `ops` must outlive nothing: it is copied.
    virtual std::unique_ptr<Graph> record(std::function<void()> ops);
    // Whether ops are queued and run beside the host, and recording them is work of its own.
    virtual bool queues() const { return false; }

    // Issues ops whose results nothing reads or overwrites, and whose inputs nothing writes, until
    // `join_aside`. A device with idle units may run them beside what follows. They see earlier calls' ops
    // and all ops before this call. Calls do not nest, so absorb_query and experts, which join, are not
    // issued aside.
    virtual void aside(const std::function<void()>& ops) { ops(); }
    virtual void join_aside() {}

    // Weights: checked here (NaN or infinite scales are refused, `name` says where), repacked once, owned by
    // the backend.
    virtual Weight upload_matrix(const HostMatrix& matrix, const std::string& name) = 0;
    virtual const float* upload_vector(std::span<const float> values, const std::string& name) = 0;
    virtual ExpertSet make_experts(std::span<const Weight> gate, std::span<const Weight> up,
                                   std::span<const Weight> down, const std::string& name) = 0;
    virtual size_t weight_bytes() const = 0;

    // Scratch that ops need for at most `rows` rows of this model's widths is taken once, by name, at
    // executor creation.
    struct WorkspaceSizes {
        int rows, hidden, heads, latent, rope, top_k, experts, intermediate, vocab;
        int positions;  // of one sequence at most
        int widest;     // row of activations that a matrix product reads
    };
    virtual void reserve_workspace(const WorkspaceSizes& sizes) = 0;

    virtual void embed(const EmbedArgs& args) = 0;
    virtual void rms_norm(const RmsNormArgs& args) = 0;
    virtual void linear(const LinearArgs& args) = 0;
    virtual void gated_linear(const GatedLinearArgs& args) = 0;
    virtual void write_latent(const WriteLatentArgs& args) = 0;
    virtual void absorb_query(const AbsorbQueryArgs& args) = 0;
    virtual void attend(const AttendArgs& args) = 0;
    virtual void project_value(const ProjectValueArgs& args) = 0;
    virtual void route(const RouteArgs& args) = 0;
    virtual void experts(const ExpertsArgs& args) = 0;
    virtual void gather_rows(const GatherRowsArgs& args) = 0;
    // Sum over ranks of a tensor-parallel group, in rank order. Identity at one rank.
    virtual void reduce_ranks(const Rows& rows, float* x, int width) = 0;

    virtual void top_k(const TopKArgs& args) = 0;
    virtual void select(const SelectArgs& args) = 0;
    virtual void build_tree(const BuildTreeArgs& args) = 0;
    virtual void tree_rows(const TreeRowsArgs& args) = 0;
    virtual void accept(const AcceptArgs& args) = 0;
    virtual void commit(const CommitArgs& args) = 0;

    // A backend without them says so: `unsupported`.
    virtual bool has_draft_ops() const { return false; }
    virtual void keep_taps(const KeepTapsArgs& args);
    virtual void norm_rotate(const NormRotateArgs& args);
    virtual void write_key_value(const WriteKeyValueArgs& args);
    virtual void block_attend(const BlockAttendArgs& args);
    // Scratch of `block_attend` over at most `rows` rows and `positions` positions, block included: taken
    // ahead, because a recorded queue of ops should not allocate.
    virtual void reserve_block_attention(int rows, int heads, int head_dim, int positions, int window);

  protected:
    [[noreturn]] void no_draft_ops() const;
};

// Memory of a backend, released with the object.
class Buffer {
  public:
    Buffer() = default;
    Buffer(Backend& backend, size_t bytes, const char* what)
        : backend_(&backend), data_(backend.allocate(bytes, what)), bytes_(bytes) {}
    Buffer(Buffer&& other) noexcept { swap(other); }
    Buffer& operator=(Buffer&& other) noexcept {
        swap(other);
        return *this;
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (data_ != nullptr) backend_->release(data_);
    }

    template <class T>
    T* as() const {
        return static_cast<T*>(data_);
    }
    size_t bytes() const { return bytes_; }

  private:
    void swap(Buffer& other) noexcept {
        std::swap(backend_, other.backend_);
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
    }
    Backend* backend_ = nullptr;
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

// Owns allocate_host's memory.
class HostBuffer {
  public:
    HostBuffer() = default;
    HostBuffer(Backend& backend, size_t bytes, const char* what)
        : backend_(&backend), data_(static_cast<char*>(backend.allocate_host(bytes, what))) {}
    HostBuffer(HostBuffer&& other) noexcept { swap(other); }
    HostBuffer& operator=(HostBuffer&& other) noexcept {
        swap(other);
        return *this;
    }
    HostBuffer(const HostBuffer&) = delete;
    HostBuffer& operator=(const HostBuffer&) = delete;
    ~HostBuffer() {
        if (data_ != nullptr) backend_->release_host(data_);
    }
    char* data() const { return data_; }

  private:
    void swap(HostBuffer& other) noexcept {
        std::swap(backend_, other.backend_);
        std::swap(data_, other.data_);
    }
    Backend* backend_ = nullptr;
    char* data_ = nullptr;
};

struct CpuOptions {
    int threads = 0;  // 0: one per core that the process may use
    std::string isa;  // "" or "auto": the best the machine has; "portable", "avx2", "avx512": insist
};

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions& options);

struct CudaOptions {
    int device = 0;
    // "bf16": operands of matrix products and of attention are rounded to bf16, the cache is bf16, sums are
    // float32. "f32": float32 throughout, for exactness. Activations between ops are float32 in both.
    std::string precision = "bf16";
};

// Throws `unsupported` in a build without CUDA, or where no driver or device is to be found.
std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options);
bool built_with_cuda();

// What the CUDA backend finds on this machine, without starting it; for `kdtree doctor`.
struct GpuReport {
    struct Gpu {
        std::string name;
        int major = 0, minor = 0;  // compute capability
        int multiprocessors = 0;
        size_t memory = 0;          // bytes
        bool compiled_for = false;  // this build holds code for it
    };
    int driver = 0, runtime = 0;  // CUDA versions, 1000 * major + 10 * minor; driver 0: none
    std::string architectures;    // as CMake names them; empty in a build without CUDA
    std::string problem;          // why there is nothing to use; empty where there is
    std::vector<Gpu> gpus;
};
GpuReport gpu_report();

}  // namespace kdt
