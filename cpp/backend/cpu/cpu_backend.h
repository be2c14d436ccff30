// The CPU backend: float32, row-pure, the same bits for every instruction set and number of threads.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "backend/backend.h"
#include "backend/cpu/kernels.h"
#include "backend/cpu/memory.h"
#include "backend/cpu/thread_pool.h"

namespace kdt::cpu {

inline constexpr int kTileColumns = 64;     // outputs of a piece
inline constexpr int kAttendRows = 8;       // rows that go through the keys together
inline constexpr int kExpertRows = 128;     // rows whose expert outputs are in the workspace at a time
inline constexpr int kSpareIndices = 4096;  // of the index scratch, beyond the vocabulary

// A matrix as `upload_matrix` stores it; Weight::data points to one of these.
struct StoredMatrix {
    PackedMatrix packed;
    Array<uint8_t> data, scales;
};

struct StoredExperts {
    std::vector<PackedMatrix> gate, up, down;
};

class CpuBackend final : public Backend {
  public:
    explicit CpuBackend(const CpuOptions& options);

    std::string name() const override { return "cpu"; }
    std::string description() const override;
    DType activation_dtype() const override { return DType::f32; }
    DType cache_dtype() const override { return DType::f32; }

    void* allocate(size_t bytes, const char* what) override;
    void release(void* pointer) override;
    void upload(void* device, const void* host, size_t bytes) override;
    void download(void* host, const void* device, size_t bytes) override;
    void fill(void* device, int byte, size_t bytes) override;
    void synchronize() override {}
    size_t memory_available() const override { return available_memory(); }
    double read_rate(size_t bytes, int passes) override;
    size_t last_level_cache() const override;

    Weight upload_matrix(const HostMatrix& matrix, const std::string& name) override;
    const float* upload_vector(std::span<const float> values, const std::string& name) override;
    ExpertSet make_experts(std::span<const Weight> gate, std::span<const Weight> up,
                           std::span<const Weight> down, const std::string& name) override;
    size_t weight_bytes() const override { return weight_bytes_; }
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
    void reduce_ranks(const Rows& rows, float* x, int width) override;
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

    // For tests and benchmarks.
    const Kernels& kernels() const { return k_; }
    double stream_sum(const float* x, size_t n);

  private:
    // What every op opens with: one op at a time, and the floating-point mode of docs/numerics.md.
    class Op {
      public:
        explicit Op(CpuBackend& backend) : lock_(backend.mutex_) {}

      private:
        std::lock_guard<std::mutex> lock_;
        FloatMode mode_;
    };

    // Scratch of one thread.
    struct Local {
        Array<float> out;          // [kMaxDotRows, kTileColumns], twice
        Array<float> values;       // [vocab]: logits over temperature
        Array<float> probability;  // [vocab]
        Array<int32_t> index;      // [2 * vocab + kSpareIndices]
    };

    struct Dot {
        const float* const* x;  // [rows]
        int rows;               // <= kMaxDotRows
        PackedMatrix w;
    };
    template <class F>
    void split_outputs(const PackedMatrix& w, int rows, const F& f);
    template <class F>
    void dot_pieces(const Dot& dot, int begin, int end, float* out, const F& f);
    void gated_pieces(const float* const* x, float* const* y, int rows, const PackedMatrix& gate,
                      const PackedMatrix& up, int begin, int end, Local& local);

    // out[r, g, j] = x[r, g] . w[g * count + j]: a matrix per head.
    struct HeadLinear {
        int rows, groups, count;
        const float* x;
        ptrdiff_t x_row, x_group;  // strides
        PackedMatrix w;
        float* out;
        ptrdiff_t out_row, out_group;
    };
    void head_linear(const HeadLinear& h);
    void head_piece(const HeadLinear& h, int group, int begin, int end, Local& local);

    const float* key_at(const RowBatch& batch, const LatentCache& cache, int row, int position,
                        int width) const;
    void check_batch(const RowBatch& batch, const LatentCache& cache, int rows) const;
    void attend_block(const AttendArgs& args, int first_row, int rows, int first_head, int heads) const;
    void expert_pass(const ExpertsArgs& args, int first_row, int rows);
    int32_t select_row(const SelectArgs& args, int row, Local& local) const;

    static int live_rows(const Rows& rows);
    static const PackedMatrix& packed(const Weight& weight);

    const Kernels& k_;
    ThreadPool pool_;
    std::mutex mutex_;
    std::vector<Local> local_;
    size_t weight_bytes_ = 0;
    std::vector<std::unique_ptr<StoredMatrix>> matrices_;
    std::vector<std::unique_ptr<StoredExperts>> expert_sets_;
    std::vector<Array<float>> vectors_;

    // Workspace of the whole backend, taken by reserve_workspace.
    Array<float> route_scores_;     // [rows, experts], twice: scores, choices
    Array<float> expert_hidden_;    // [expert rows * top_k, intermediate]
    Array<float> expert_out_;       // [expert rows * top_k, hidden]
    Array<int32_t> expert_slots_;   // [expert rows * top_k]: slots by expert
    Array<int32_t> expert_starts_;  // [experts + 1]
};

}  // namespace kdt::cpu
