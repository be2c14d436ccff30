// The inner loops of the CPU backend, one table of functions per instruction set. The same source (the
// *.inc.h files) is compiled once for each; every table computes the same bits (docs/numerics.md).
//
// Only raw pointers and plain structs cross this border: the AVX translation units must not instantiate
// inline functions that the linker could then choose for code that runs on older machines.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kdt::cpu {

inline constexpr int kLanes = 16;        // of every accumulator
inline constexpr int kBlockOutputs = 4;  // outputs that are stored together
inline constexpr int kGroupBlocks = 4;   // blocks that share one pass over the rows
inline constexpr int kMaxDotRows = 128;  // rows of one DotJob
inline constexpr int kMaxQueries = 16;   // queries of one AttendJob

// Stored form of a matrix. Per block of four outputs and unit of inputs, four 64-byte vectors, one an output;
// lane l of step j holds input unit * (16 * steps) + 16 * j + l. Short blocks and units are filled with
// zeros.
//   f32       1 step a unit: sixteen floats
//   bf16      2 steps: 32-bit words, step 0 in the low half
//   w4_*      8 steps: 32-bit words, step j in nibble j as two's complement of nibble - 8; scales beside it,
//             [block, unit, output, 4], as f32 or bf16
enum class Format : uint8_t { f32, bf16, w4_f32, w4_bf16 };

constexpr int unit_steps(Format format) {
    return format == Format::f32 ? 1 : format == Format::bf16 ? 2 : 8;
}

struct PackedMatrix {
    Format format;
    int out, in;
    const uint8_t* data;
    const uint8_t* scales;
};

// out[r * stride + 4 * (b - block_begin) + o] = x[r] . w[4 * b + o], outputs past the matrix' last as zeros.
struct DotJob {
    const float* const* x;  // [rows] pointers to `in` floats
    int rows;               // <= kMaxDotRows
    PackedMatrix w;
    int block_begin, block_end;
    float* out;
    ptrdiff_t stride;
};

// One softmax step of `n` queries of one row over one chunk of keys, in order.
struct AttendJob {
    const float* const* q;      // [n] pointers to key_width floats
    float* const* o;            // [n] pointers to value_width floats: accumulators
    float* m;                   // [n] running maximum
    float* l;                   // [n] running sum
    int n;                      // <= kMaxQueries
    const float* const* key;    // [count] pointers to key_width floats
    const float* const* value;  // [count] pointers to value_width floats; latent attention: the keys again
    int count;                  // 1..kChunkSize
    int key_width, value_width;
    float scale;
    bool first;  // the row's first chunk: o, m and l are written without being read
};

struct Scan {
    float max;   // of all values; -inf where none is greater
    int argmax;  // lowest index of the maximum; -1 where no value is greater than -inf
    bool has_nan;
};

struct GumbelJob {      // argmax of z + gumbel, ties to the lower id
    const float* z;     // [n], the largest is 0
    const int32_t* id;  // [n] token ids; null: 0, 1, 2, ...
    int n;
    float min_p;  // entries with exp(z) < min_p are out of the race
    uint32_t key[2];
    uint32_t position, choice;
};

struct Kernels {
    const char* name;
    void (*dots)(const DotJob& job);
    void (*attend)(const AttendJob& job);
    void (*scale_rows)(float* const* o, const float* l, int n, int latent);  // o[i] /= l[i]
    float (*sum_of_squares)(const float* x, int n);
    void (*scale_by)(const float* x, float r, const float* weight, int n, float* y);  // y = (x * r) * weight
    void (*silu_mul)(const float* gate, const float* up, int n, float* y);
    void (*sigmoid)(float* x, int n);
    void (*scale_to)(float a, float* y, int n);                   // y = fma(a, y, +0)
    void (*axpy)(float a, const float* x, int n, float* y);       // y = fma(a, x, y)
    void (*add)(const float* x, int n, float* y);                 // y = y + x
    void (*widen_row)(const PackedMatrix& w, int row, float* y);  // a row of an f32 or bf16 matrix
    Scan (*scan)(const float* x, int n);
    void (*shift_divide)(const float* x, float top, float by, int n,
                         float* y);  // (x - top) / by, 0 at x == top
    // p = exp(x - max), 1 where x == max; p may be null. The sum: 16 lanes by index, then the lane tree.
    float (*exp_sum)(const float* x, float max, int n, float* p);
    float (*lane_sum)(const float* lanes);  // the lane tree over sixteen values
    void (*exp_each)(const float* x, int n, float* y);
    void (*log_each)(const float* x, int n, float* y);
    // Indices i >= begin with x[i] > threshold or x[i] == threshold, ascending, at most `capacity`; returns
    // how many, and in *next the index to go on at (n: all seen).
    int (*find_at_least)(const float* x, int begin, int n, float threshold, int capacity, int32_t* index,
                         int* next);
    int32_t (*gumbel_argmax)(const GumbelJob& job);
    void (*philox)(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);
    void (*gumbel_each)(const GumbelJob& job, float* out);  // the noise alone, for tests
    float (*stream_sum)(const float* x,
                        size_t n);  // reads memory as fast as it can: a yardstick for benchmarks
};

extern const Kernels kPortableKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// "", "auto": the environment variable KDTREE_CPU_ISA, and without it the best that the machine has.
// "portable", "avx2", "avx512": that one. Throws `invalid_argument` for other names, `unsupported` where the
// machine lacks it.
const Kernels& choose_kernels(const std::string& isa);

}  // namespace kdt::cpu
