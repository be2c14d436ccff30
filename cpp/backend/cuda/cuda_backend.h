// The CUDA backend: memory, weights, and the op table as launches on a stream, or on the one beside it.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "backend/cuda/attention.h"
#include "backend/cuda/experts.h"
#include "backend/cuda/gemm.h"

namespace kdt::cuda {

// Device memory for weights: slabs that grow, so that many matrices cost few allocations.
class WeightArena {
  public:
    explicit WeightArena(int device) : device_(device) {}
    ~WeightArena();
    WeightArena(const WeightArena&) = delete;
    WeightArena& operator=(const WeightArena&) = delete;

    unsigned char* take(size_t bytes, const char* what);
    size_t used() const { return used_; }

  private:
    int device_;
    std::vector<unsigned char*> slabs_;
    unsigned char* next_ = nullptr;
    size_t left_ = 0, used_ = 0;
};

class CudaBackend final : public Backend {
  public:
    explicit CudaBackend(const CudaOptions& options);
    ~CudaBackend() override;

    std::string name() const override { return "cuda"; }
    std::string description() const override { return description_; }
    DType activation_dtype() const override { return DType::f32; }
    DType cache_dtype() const override { return bf16_ ? DType::bf16 : DType::f32; }

    void* allocate(size_t bytes, const char* what) override;
    void release(void* pointer) override;
    void* allocate_host(size_t bytes, const char* what) override;
    void release_host(void* pointer) override;
    void upload(void* device, const void* host, size_t bytes) override;
    void download(void* host, const void* device, size_t bytes) override;
    void fill(void* device, int byte, size_t bytes) override;
    void synchronize() override;
    size_t memory_available() const override;
    double read_rate(size_t bytes, int passes) override;
    size_t last_level_cache() const override;
    std::unique_ptr<Graph> record(std::function<void()> ops) override;
    bool queues() const override { return true; }
    void aside(const std::function<void()>& ops) override;
    void join_aside() override;

    Weight upload_matrix(const HostMatrix& matrix, const std::string& name) override;
    const float* upload_vector(std::span<const float> values, const std::string& name) override;
    ExpertSet make_experts(std::span<const Weight> gate, std::span<const Weight> up,
                           std::span<const Weight> down, const std::string& name) override;
    size_t weight_bytes() const override { return arena_.used(); }
    void reserve_workspace(const WorkspaceSizes& sizes) override;

    void embed(const EmbedArgs& args) override;
    void rms_norm(const RmsNormArgs& args) override;
    void linear(const LinearArgs& args) override;
    void gated_linear(const GatedLinearArgs& args) override;
    void write_latent(const WriteLatentArgs& args) override;
    void absorb_query(const AbsorbQueryArgs& args) override;
    void attend(const AttendArgs& args) override;
    void project_value(const ProjectValueArgs& args) override;
    void route(const RouteArgs& args) override;
    void experts(const ExpertsArgs& args) override;
    void gather_rows(const GatherRowsArgs& args) override;
    void reduce_ranks(const Rows&, float*, int) override {}  // one rank: the sum over ranks is what is there

    void top_k(const TopKArgs& args) override;
    void select(const SelectArgs& args) override;
    void build_tree(const BuildTreeArgs& args) override;
    void tree_rows(const TreeRowsArgs& args) override;
    void accept(const AcceptArgs& args) override;
    void commit(const CommitArgs& args) override;

    bool has_draft_ops() const override { return true; }
    void keep_taps(const KeepTapsArgs& args) override;
    void norm_rotate(const NormRotateArgs& args) override;
    void write_key_value(const WriteKeyValueArgs& args) override;
    void block_attend(const BlockAttendArgs& args) override;
    void reserve_block_attention(int rows, int heads, int head_dim, int positions, int window) override;

    // For benchmarks: the stream that every op is queued on, so that a graph can be captured.
    cudaStream_t stream() const { return stream_; }

  private:
    struct Experts {              // what ExpertSet::table points to
        const void* const* gate;  // device: [count] matrices
        const void* const* up;
        const void* const* down;
        Weight gate_like, down_like;  // kind and shape of each
    };

    GemmLaunch at(const char* op);
    void product(const char* op, WeightKind kind, const GemmArgs& args, int experts);
    unsigned char* workspace(size_t bytes);
    void reserve(int line, size_t bytes);
    void repack(const HostMatrix& matrix, unsigned char* to, const std::string& name);

    int device_ = 0;
    Machine machine_{1, {1, 1, 1, 1}};
    bool bf16_ = true;
    std::string description_;
    cudaStream_t stream_ = nullptr, aside_stream_ = nullptr;
    cudaEvent_t forked_ = nullptr, aside_done_ = nullptr;
    int line_ = 0;  // 1 within `aside`
    bool aside_pending_ = false;
    WeightArena arena_;
    std::vector<std::unique_ptr<Experts>> experts_;
    unsigned char* workspace_[2] = {};  // of each line, which run beside each other
    size_t workspace_bytes_[2] = {};
    std::vector<unsigned char*> outgrown_workspaces_;
    unsigned char* staging_ = nullptr;  // raw weights on their way into the layout
    int32_t* bad_row_ = nullptr;
};

}  // namespace kdt::cuda
