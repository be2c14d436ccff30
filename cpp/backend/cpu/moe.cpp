// Router and routed experts of the CPU backend.
#include <cmath>
#include <cstring>

#include "backend/cpu/linear.h"
#include "core/error.h"

namespace kdt::cpu {

namespace {

// A NaN ranks below everything, so that the row that holds it still chooses distinct experts that exist.
float rank_of(float x) {
    return x == x ? x : -HUGE_VALF;
}

struct Pick {
    const float* value;
    int count;
    // The index of the largest value that is not taken; ties: the lowest.
    int best(const uint8_t* taken) const {
        int at = -1;
        for (int i = 0; i < count; ++i)
            if (!taken[i] && (at < 0 || rank_of(value[i]) > rank_of(value[at]))) at = i;
        return at;
    }
};

constexpr int kMaxExperts = 4096;

// Marks the experts outside the chosen groups as taken.
void limit_to_groups(const RouteArgs& args, const float* choice, int experts, uint8_t* taken) {
    const int size = experts / args.groups;
    float score[kMaxExperts];
    for (int g = 0; g < args.groups; ++g) {
        float best = -HUGE_VALF, second = -HUGE_VALF;
        for (int i = 0; i < size; ++i) {
            const float v = rank_of(choice[g * size + i]);
            if (v > best) {
                second = best;
                best = v;
            } else if (v > second) {
                second = v;
            }
        }
        score[g] = args.scoring == Scoring::softmax_greedy || size == 1 ? best : best + second;
    }
    uint8_t chosen[kMaxExperts] = {};
    for (int n = 0; n < args.top_groups; ++n) chosen[Pick{score, args.groups}.best(chosen)] = 1;
    for (int e = 0; e < experts; ++e) taken[e] = !chosen[e / size];
}

void route_row(const RouteArgs& args, const Kernels& k, float* score, float* choice, int experts,
               int32_t* expert, float* weight) {
    if (args.scoring == Scoring::sigmoid_noaux_tc) {
        k.sigmoid(score, experts);
        for (int e = 0; e < experts; ++e) choice[e] = score[e] + args.bias[e];
    } else {
        float top = -HUGE_VALF;
        for (int e = 0; e < experts; ++e) top = score[e] > top ? score[e] : top;
        k.exp_sum(score, top, experts, score);
        float sum = 0.0f;
        for (int e = 0; e < experts; ++e) sum = sum + score[e];
        for (int e = 0; e < experts; ++e) score[e] = score[e] / sum;
        std::memcpy(choice, score, static_cast<size_t>(experts) * sizeof(float));
    }
    uint8_t taken[kMaxExperts] = {};
    if (args.groups > 1) limit_to_groups(args, choice, experts, taken);
    float sum = 0.0f;
    for (int slot = 0; slot < args.top_k; ++slot) {
        const int best = Pick{choice, experts}.best(taken);
        taken[best] = 1;
        expert[slot] = best;
        weight[slot] = score[best];
        sum = sum + score[best];
    }
    for (int slot = 0; slot < args.top_k; ++slot) {
        if (args.normalize) weight[slot] = weight[slot] / (sum + 1e-20f);
        weight[slot] = weight[slot] * args.scaling;
    }
}

}  // namespace

void CpuBackend::route(const RouteArgs& args) {
    const Op op(*this);
    const PackedMatrix& gate = packed(args.gate);
    const int experts = gate.out;
    const int rows = live_rows(args.rows);
    if (experts > kMaxExperts)
        fail(ErrorCode::unsupported, "%d experts; the router takes up to %d", experts, kMaxExperts);
    if (args.groups < 1 || experts % args.groups != 0 || args.top_groups < 1 || args.top_groups > args.groups)
        fail(ErrorCode::invalid_argument, "%d experts in %d groups, %d of them chosen, do not go together",
             experts, args.groups, args.top_groups);
    if (args.top_k < 1 || args.top_k > experts / args.groups * args.top_groups)
        fail(ErrorCode::invalid_argument, "%d experts of %d per row were asked for", args.top_k,
             experts / args.groups * args.top_groups);
    if (args.scoring == Scoring::sigmoid_noaux_tc && args.bias == nullptr)
        fail(ErrorCode::invalid_argument, "the sigmoid router has no correction bias");
    const size_t cells = static_cast<size_t>(rows) * static_cast<size_t>(experts);
    if (2 * cells > route_scores_.size())
        fail(ErrorCode::invalid_argument,
             "routing %d rows to %d experts needs more workspace than was reserved", rows, experts);
    float* const scores = route_scores_.data();
    float* const choices = scores + cells;

    for (int first = 0; first < rows; first += kMaxDotRows) {
        const int n = std::min(kMaxDotRows, rows - first);
        const float* x[kMaxDotRows];
        for (int r = 0; r < n; ++r) x[r] = args.x + static_cast<ptrdiff_t>(first + r) * gate.in;
        split_outputs(gate, n, [&](int begin, int end, Local& local) {
            dot_pieces({x, n, gate}, begin, end, local.out.data(), [&](int at, int count, const float* sums) {
                for (int r = 0; r < n; ++r)
                    std::memcpy(scores + static_cast<ptrdiff_t>(first + r) * experts + at,
                                sums + r * kTileColumns, static_cast<size_t>(count) * sizeof(float));
            });
        });
    }
    pool_.split(rows, std::max(1, 8192 / (experts * args.top_k)), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            route_row(args, k_, scores + i * experts, choices + i * experts, experts,
                      args.expert + i * args.top_k, args.weight + i * args.top_k);
    });
}

void CpuBackend::experts(const ExpertsArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    if (args.experts.table == nullptr) fail(ErrorCode::internal, "a layer without experts");
    for (int i = 0; i < rows * args.top_k; ++i)
        if (args.expert[i] < 0 || args.expert[i] >= args.experts.count)
            fail(ErrorCode::invalid_argument, "row %d chose expert %d of %d", i / args.top_k, args.expert[i],
                 args.experts.count);
    const size_t slots = static_cast<size_t>(std::min(rows, kExpertRows)) * static_cast<size_t>(args.top_k);
    if (slots > expert_slots_.size() || static_cast<size_t>(args.experts.count) + 1 > expert_starts_.size() ||
        slots * static_cast<size_t>(args.experts.intermediate) > expert_hidden_.size() ||
        slots * static_cast<size_t>(args.experts.hidden) > expert_out_.size())
        fail(ErrorCode::invalid_argument, "%d rows of %d experts need more workspace than was reserved", rows,
             args.top_k);
    for (int first = 0; first < rows; first += kExpertRows)
        expert_pass(args, first, std::min(kExpertRows, rows - first));
}

// Slots are sorted by expert, so that each expert's weights are read once; their outputs are kept apart and
// summed per row in slot order.
void CpuBackend::expert_pass(const ExpertsArgs& args, int first_row, int rows) {
    const StoredExperts& table = *static_cast<const StoredExperts*>(args.experts.table);
    const int hidden = args.experts.hidden, intermediate = args.experts.intermediate;
    const int count = args.experts.count;
    const int slots = rows * args.top_k;
    const int32_t* chosen = args.expert + static_cast<ptrdiff_t>(first_row) * args.top_k;
    int32_t* const start = expert_starts_.data();
    int32_t* const slot_of = expert_slots_.data();
    std::memset(start, 0, (static_cast<size_t>(count) + 1) * sizeof(int32_t));
    for (int s = 0; s < slots; ++s) ++start[chosen[s] + 1];
    for (int e = 0; e < count; ++e) start[e + 1] += start[e];
    for (int s = 0; s < slots; ++s) slot_of[start[chosen[s]]++] = s;
    for (int e = count; e > 0; --e) start[e] = start[e - 1];
    start[0] = 0;

    float* const h = expert_hidden_.data();
    float* const out = expert_out_.data();
    // A share is some of the outputs of every chosen expert.
    const int64_t work = static_cast<int64_t>(slots) * hidden * intermediate;
    const int64_t shares = std::max<int64_t>(1, std::min<int64_t>(2 * pool_.size(), work >> 15));
    const auto each_expert = [&](int outputs, int64_t share, const auto& f) {
        const int blocks = (outputs + kBlockOutputs - 1) / kBlockOutputs;
        const int begin = static_cast<int>(blocks * share / shares) * kBlockOutputs;
        const int end = std::min(static_cast<int>(blocks * (share + 1) / shares) * kBlockOutputs, outputs);
        if (begin >= end) return;
        for (int e = 0; e < count; ++e)
            for (int first = start[e]; first < start[e + 1]; first += kMaxDotRows)
                f(e, first, std::min(kMaxDotRows, start[e + 1] - first), begin, end);
    };
    pool_.split(shares, 1, [&](int64_t from, int64_t to, int thread) {
        for (int64_t share = from; share < to; ++share)
            each_expert(intermediate, share, [&](int e, int first, int n, int begin, int end) {
                const float* x[kMaxDotRows];
                float* y[kMaxDotRows];
                for (int r = 0; r < n; ++r) {
                    const int slot = slot_of[first + r];
                    x[r] = args.x + static_cast<ptrdiff_t>(first_row + slot / args.top_k) * hidden;
                    y[r] = h + static_cast<ptrdiff_t>(slot) * intermediate;
                }
                gated_pieces(x, y, n, table.gate[static_cast<size_t>(e)], table.up[static_cast<size_t>(e)],
                             begin, end, local_[static_cast<size_t>(thread)]);
            });
    });
    pool_.split(shares, 1, [&](int64_t from, int64_t to, int thread) {
        for (int64_t share = from; share < to; ++share)
            each_expert(hidden, share, [&](int e, int first, int n, int begin, int end) {
                const float* x[kMaxDotRows];
                float* y[kMaxDotRows];
                for (int r = 0; r < n; ++r) {
                    const int slot = slot_of[first + r];
                    x[r] = h + static_cast<ptrdiff_t>(slot) * intermediate;
                    y[r] = out + static_cast<ptrdiff_t>(slot) * hidden;
                }
                Local& local = local_[static_cast<size_t>(thread)];
                dot_pieces({x, n, table.down[static_cast<size_t>(e)]}, begin, end, local.out.data(),
                           [&](int at, int columns, const float* sums) {
                               for (int r = 0; r < n; ++r)
                                   std::memcpy(y[r] + at, sums + r * kTileColumns,
                                               static_cast<size_t>(columns) * sizeof(float));
                           });
            });
    });
    pool_.split(rows, std::max(1, (1 << 14) / (hidden * args.top_k)), [&](int64_t from, int64_t to, int) {
        for (int64_t i = from; i < to; ++i) {
            // The first slot's output becomes the sum: fma onto +0 in place of it.
            float* acc = out + i * args.top_k * hidden;
            const float* weight = args.weight + (first_row + i) * args.top_k;
            k_.scale_to(weight[0], acc, hidden);
            for (int slot = 1; slot < args.top_k; ++slot)
                k_.axpy(weight[slot], acc + slot * hidden, hidden, acc);
            if (args.shared != nullptr) k_.add(args.shared + (first_row + i) * hidden, hidden, acc);
            k_.add(acc, hidden, args.y + (first_row + i) * hidden);
        }
    });
}

}  // namespace kdt::cpu
