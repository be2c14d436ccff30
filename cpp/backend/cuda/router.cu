// The router: float32 logits of every expert, then the best experts of each row (docs/kernels/router.md).
#include "backend/cuda/router.h"

#include "backend/cuda/launch.h"
#include "backend/cuda/layout.h"
#include "backend/cuda/plan.h"

namespace kdt::cuda {

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;

// ----------------------------------------------------------------------------------------------------------------
// logits

constexpr int kCluster = 8, kWarps = 8, kThreads = kWarps * 32;
constexpr int kCutSteps = 4;  // steps of 32 columns that a warp holds in registers
constexpr int kCutColumns = kCutSteps * kStepColumns;
constexpr int kGroup = 8;  // tokens of one pass over the weights
constexpr int kTurn = 64;  // tokens between two meetings of the cluster
static_assert(kRouterColumns == kCluster * kWarps * kCutColumns);

struct LogitsArgs {
    Rows rows;
    const float* x;  // [rows, in]
    int in;
    bool wide;  // 16-byte copies of x are possible
    const unsigned char* w;
    int k_blocks, tiles, out;
    float* y;  // [rows, out]
};

// Row tiles of a block: what fits into registers.
template <WeightKind Kind>
constexpr int kTiles = Kind == WeightKind::f32 ? 1 : 2;

// What a lane holds of one step of one tile: 8 columns of rows g and g + 8.
template <WeightKind Kind>
struct Fragment {
    static constexpr int kWords = Kind == WeightKind::f32 ? 4 : 2;
    uint4 word[kWords];

    __device__ __forceinline__ void load(const unsigned char* block, int step, int lane) {
#pragma unroll
        for (int i = 0; i < kWords; ++i)
            word[i] = ptx::load_streaming(block + (step * kWords + i) * 512 + lane * 16);
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < kWords; ++i) word[i] = make_uint4(0, 0, 0, 0);
    }
    __device__ __forceinline__ void widen(int half, float (&w)[8]) const {
        if constexpr (Kind == WeightKind::f32) {
            const uint4 a = word[2 * half], b = word[2 * half + 1];
            const uint32_t bits[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
            for (int j = 0; j < 8; ++j) w[j] = __uint_as_float(bits[j]);
        } else {
            const uint32_t bits[4] = {word[half].x, word[half].y, word[half].z, word[half].w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float2 pair = widen_bf16x2(bits[j]);
                w[2 * j] = pair.x;
                w[2 * j + 1] = pair.y;
            }
        }
    }
};

// Shared memory: x [warp][2][kGroup][kCutColumns], partials [2][warp][kGroup][rows], sums [kTurn][rows].
template <WeightKind Kind>
constexpr int kLogitsShared =
    (kWarps * 2 * kGroup * kCutColumns + (2 * kWarps * kGroup + kTurn) * kTiles<Kind> * kTileRows) * 4;

// A cluster takes kTiles row tiles; its 8 x 8 warps cut K at borders that depend on K alone and keep their
// weights in registers. Lane 4 g + t has one accumulator a row and token over its own columns (8 t .. 8 t + 7
// of every 32), ascending, by fma; then lanes (t, t ^ 1), (t, t ^ 2); then warps, then blocks in order.
template <WeightKind Kind>
__global__ void __launch_bounds__(kThreads, 1) router_logits(const LogitsArgs a) {
    ptx::grid_launch_next();
    constexpr int kBlockRows = kTiles<Kind> * kTileRows;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int g = lane / 4, t = lane % 4;
    const int rank = static_cast<int>(blockIdx.x), cut = rank * kWarps + warp;
    const int step0 = split_border(a.k_blocks * 2, cut, kCluster * kWarps);
    const int steps = split_border(a.k_blocks * 2, cut + 1, kCluster * kWarps) - step0;
    const int first_row = static_cast<int>(blockIdx.y) * kBlockRows;

    Fragment<Kind> weights[kTiles<Kind>][kCutSteps];
#pragma unroll
    for (int m = 0; m < kTiles<Kind>; ++m) {
        const int tile = static_cast<int>(blockIdx.y) * kTiles<Kind> + m;
#pragma unroll
        for (int i = 0; i < kCutSteps; ++i) {
            weights[m][i].clear();
            if (i < steps && tile < a.tiles)
                weights[m][i].load(a.w + (static_cast<size_t>(tile) * a.k_blocks + (step0 + i) / 2) *
                                             block_bytes(Kind, false),
                                   (step0 + i) % 2, lane);
        }
    }
    ptx::grid_wait();

    float* const shared = reinterpret_cast<float*>(ptx::shared_memory());
    float* const staged = shared + warp * 2 * kGroup * kCutColumns;
    float* const partials = shared + kWarps * 2 * kGroup * kCutColumns;
    float* const sums = partials + 2 * kWarps * kGroup * kBlockRows;
    const int rows = live_rows(a.rows);

    // This warp's columns of the tokens of a group, into one half of `staged`.
    const int column = step0 * kStepColumns + lane * 4;
    const bool mine = lane / 8 < steps;
    const auto stage = [&](int first) {
        float* const to = staged + first / kGroup % 2 * kGroup * kCutColumns + lane * 4;
        for (int i = 0; i < kGroup && first + i < rows; ++i) {
            const float* const from = a.x + static_cast<long long>(first + i) * a.in + column;
            if (a.wide) {
                const bool inside = mine && column < a.in;
                ptx::copy_async_16(ptx::shared_address(to + i * kCutColumns), inside ? from : a.x, inside);
            } else {
                for (int j = 0; j < 4; ++j)
                    to[i * kCutColumns + j] = mine && column + j < a.in ? load_activation(from + j) : 0.0f;
            }
        }
        ptx::copy_async_commit();
    };

    stage(0);
    for (int first = 0; first < rows; first += kGroup) {
        stage(first + kGroup);
        ptx::copy_async_wait<1>();
        __syncwarp();
        const int tokens = min(kGroup, rows - first), half_of = first / kGroup % 2;
        const float* const x = staged + half_of * kGroup * kCutColumns + t * 8;
        float acc[kTiles<Kind>][2][kGroup] = {};
#pragma unroll
        for (int i = 0; i < kCutSteps; ++i) {
            float w[kTiles<Kind>][2][8];
#pragma unroll
            for (int m = 0; m < kTiles<Kind>; ++m) {
                weights[m][i].widen(0, w[m][0]);
                weights[m][i].widen(1, w[m][1]);
            }
#pragma unroll
            for (int n = 0; n < kGroup; ++n) {
                if (n >= tokens) break;
                const float4 low = *reinterpret_cast<const float4*>(x + n * kCutColumns + i * kStepColumns);
                const float4 high =
                    *reinterpret_cast<const float4*>(x + n * kCutColumns + i * kStepColumns + 4);
                const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
                for (int m = 0; m < kTiles<Kind>; ++m)
#pragma unroll
                    for (int h = 0; h < 2; ++h)
#pragma unroll
                        for (int j = 0; j < 8; ++j) acc[m][h][n] = fmaf(w[m][h][j], v[j], acc[m][h][n]);
            }
        }
        float* const part = partials + half_of * kWarps * kGroup * kBlockRows;
#pragma unroll
        for (int m = 0; m < kTiles<Kind>; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h)
#pragma unroll
                for (int n = 0; n < kGroup; ++n) {
                    if (n >= tokens) break;
                    float sum = acc[m][h][n];
                    sum += __shfl_xor_sync(kAll, sum, 1);
                    sum += __shfl_xor_sync(kAll, sum, 2);
                    if (t == 0) part[(warp * kGroup + n) * kBlockRows + m * kTileRows + h * 8 + g] = sum;
                }
        __syncthreads();  // one a group: the next group writes the other half
        for (int e = thread; e < tokens * kBlockRows; e += kThreads) {
            float sum = part[e];
            for (int w = 1; w < kWarps; ++w) sum += part[w * kGroup * kBlockRows + e];
            sums[first % kTurn * kBlockRows + e] = sum;
        }
        const int turn = first / kTurn * kTurn;
        if (first + kGroup - turn < kTurn && first + kGroup < rows) continue;

        ptx::cluster_sync();
        const int values = min(kTurn, rows - turn) * kBlockRows;
        for (int e = rank * kThreads + thread; e < values; e += kCluster * kThreads) {
            float each[kCluster];
#pragma unroll
            for (int r = 0; r < kCluster; ++r)
                each[r] = ptx::cluster_load(sums + e, static_cast<uint32_t>(r));
            float sum = each[0];
#pragma unroll
            for (int r = 1; r < kCluster; ++r) sum += each[r];
            const int n = first_row + e % kBlockRows;
            if (n < a.out) a.y[static_cast<long long>(turn + e / kBlockRows) * a.out + n] = sum;
        }
        ptx::cluster_sync();
    }
    ptx::copy_async_wait<0>();
}

template <WeightKind Kind>
void run_logits(const GemmLaunch& l, const LogitsArgs& args) {
    const unsigned parts = static_cast<unsigned>((args.tiles + kTiles<Kind> - 1) / kTiles<Kind>);
    launch<router_logits<Kind>>(
        {l.stream, l.device, l.name, dim3(kCluster, parts), kThreads, kLogitsShared<Kind>, kCluster}, args);
}

// ----------------------------------------------------------------------------------------------------------------
// choice

// Orders as the float does, NaN aside, and is never 0; -0 as +0.
__device__ __forceinline__ uint32_t float_key(float x) {
    const uint32_t bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Which of the groups are in the race, bit by bit in `open` [groups]. `choice`: [experts].
__device__ __forceinline__ void choose_groups(const RouteArgs& a, const float* choice, float* group_score,
                                              int experts, int lane) {
    const int per_group = experts / a.groups;
    for (int g = lane; g < a.groups; g += 32) {
        float best = -INFINITY, second = -INFINITY;
        for (int e = g * per_group; e < (g + 1) * per_group; ++e) {
            const float v = choice[e];
            second = fmaxf(second, fminf(best, v));
            best = fmaxf(best, v);
        }
        group_score[g] = a.scoring == Scoring::softmax_greedy || per_group == 1 ? best : best + second;
    }
    __syncwarp();
    uint32_t kept = 0;  // bit j for group lane + 32 j
    for (int n = 0; n < a.top_groups; ++n) {
        uint32_t best = 0;
        int id = INT32_MAX;
        for (int g = lane, j = 0; g < a.groups; g += 32, ++j) {
            const uint32_t key = kept >> j & 1 ? 0 : float_key(group_score[g]);
            if (key > best) best = key, id = g;
        }
        const uint32_t greatest = __reduce_max_sync(kAll, best);
        const uint32_t winner = __reduce_min_sync(kAll, best == greatest ? static_cast<uint32_t>(id) : kAll);
        if (static_cast<int>(winner % 32) == lane) kept |= 1u << (winner / 32);
    }
    __syncwarp();
    for (int g = lane, j = 0; g < a.groups; g += 32, ++j) group_score[g] = kept >> j & 1 ? 1.0f : 0.0f;
    __syncwarp();
}

// One warp a row, expert e in lane e % 32. NaN counts as -infinity, so that any input gives top_k different
// experts.
template <int Per>
__global__ void __launch_bounds__(32, 1) route(const RouteArgs a, const float* logits, int experts) {
    ptx::grid_launch_next();
    const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
    const bool sigmoid = a.scoring == Scoring::sigmoid_noaux_tc;
    float score[Per], bias[Per];
#pragma unroll
    for (int j = 0; j < Per; ++j) {
        const int e = lane + 32 * j;
        bias[j] = sigmoid && e < experts ? a.bias[e] : 0.0f;
    }
    ptx::grid_wait();
    const float* x = logits + static_cast<long long>(row) * experts;
#pragma unroll
    for (int j = 0; j < Per; ++j) {
        const int e = lane + 32 * j;
        score[j] = e < experts ? load_activation(x + e) : -INFINITY;
    }
    if (row >= live_rows(a.rows)) return;

    uint32_t key[Per];                                                     // 0: not in the race
    float* const choice = reinterpret_cast<float*>(ptx::shared_memory());  // [experts], with groups only
    float* const group_score = choice + experts;                           // [groups]
    if (!sigmoid) {
        float greatest = -INFINITY;
#pragma unroll
        for (int j = 0; j < Per; ++j) greatest = fmaxf(greatest, score[j]);
        greatest = warp_max(greatest);
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < Per; ++j)
            if (lane + 32 * j < experts) {
                score[j] = expf(score[j] - greatest);
                sum += score[j];
            }
        sum = warp_sum(sum);
#pragma unroll
        for (int j = 0; j < Per; ++j) score[j] = score[j] / sum;
    }
#pragma unroll
    for (int j = 0; j < Per; ++j) {
        const int e = lane + 32 * j;
        if (sigmoid) score[j] = 1.0f / (1.0f + expf(-score[j]));
        float c = sigmoid ? score[j] + bias[j] : score[j];
        if (!(c == c)) c = -INFINITY;
        key[j] = e < experts ? float_key(c) : 0;
        if (a.groups > 1 && e < experts) choice[e] = c;
    }
    if (a.groups > 1) {
        __syncwarp();
        choose_groups(a, choice, group_score, experts, lane);
        const int per_group = experts / a.groups;
#pragma unroll
        for (int j = 0; j < Per; ++j) {
            const int e = lane + 32 * j;
            if (e < experts && group_score[e / per_group] == 0.0f) key[j] = 0;
        }
    }

    float mine = 0.0f;  // weight of slot `lane`
    int mine_id = 0;
    for (int slot = 0; slot < a.top_k; ++slot) {
        uint32_t best = 0;
        int at = 0;
        float weight = 0.0f;
#pragma unroll
        for (int j = 0; j < Per; ++j)  // the first of equals is the lowest id
            if (key[j] > best) {
                best = key[j];
                at = j;
                weight = score[j];
            }
        const uint32_t greatest = __reduce_max_sync(kAll, best);
        const uint32_t id =
            __reduce_min_sync(kAll, best == greatest ? static_cast<uint32_t>(lane + 32 * at) : kAll);
        const int lead = static_cast<int>(id % 32);
        weight = __shfl_sync(kAll, weight, lead);
        if (slot == lane) {
            mine = weight;
            mine_id = static_cast<int>(id);
        }
#pragma unroll
        for (int j = 0; j < Per; ++j)
            if (lane == lead && at == j) key[j] = 0;
    }
    if (a.normalize) {
        float sum = 0.0f;
#pragma unroll 8
        for (int slot = 0; slot < a.top_k; ++slot) sum += __shfl_sync(kAll, mine, slot);
        mine = mine / (sum + 1e-20f);
    }
    mine *= a.scaling;
    if (lane < a.top_k) {
        a.expert[static_cast<long long>(row) * a.top_k + lane] = mine_id;
        a.weight[static_cast<long long>(row) * a.top_k + lane] = mine;
    }
}

}  // namespace

bool has_router_kernel(const Weight& gate) {
    return gate.kind != WeightKind::w4a16 && gate.in <= kRouterColumns;
}

void launch_router_logits(const GemmLaunch& l, const RouteArgs& args, float* logits) {
    const Weight& w = args.gate;
    const LogitsArgs a{args.rows,
                       args.x,
                       w.in,
                       w.in % 4 == 0 && reinterpret_cast<uintptr_t>(args.x) % 16 == 0,
                       static_cast<const unsigned char*>(w.data),
                       column_blocks(w.in),
                       row_tiles(w.out),
                       w.out,
                       logits};
    if (w.kind == WeightKind::f32)
        run_logits<WeightKind::f32>(l, a);
    else
        run_logits<WeightKind::bf16>(l, a);
}

void launch_route(const GemmLaunch& l, const RouteArgs& args, const float* logits) {
    const int experts = args.gate.out, per = (experts + 31) / 32;
    const Launch as{l.stream, l.device,
                    l.name,   dim3(static_cast<unsigned>(args.rows.capacity)),
                    32,       args.groups > 1 ? (experts + args.groups) * 4 : 0};
    if (per <= 2)
        launch<route<2>>(as, args, logits, experts);
    else if (per <= 8)
        launch<route<8>>(as, args, logits, experts);
    else if (per <= 12)
        launch<route<12>>(as, args, logits, experts);
    else
        launch<route<32>>(as, args, logits, experts);
}

}  // namespace kdt::cuda
