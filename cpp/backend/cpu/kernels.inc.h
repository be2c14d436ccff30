// The body of one instruction set: kernels_*.cpp define KDT_ISA (namespace), KDT_VEC_HEADER, KDT_TABLE and
// KDT_NAME and include this file. No standard library code in here: see kernels.h.

#include "backend/cpu/kernels.h"
#include "core/limits.h"

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KDT_SANITIZED 1
#endif
#elif defined(__SANITIZE_ADDRESS__)
#define KDT_SANITIZED 1
#endif
#if defined(KDT_SANITIZED)  // checks on every access of everything inlined take minutes to compile
#define KDT_INLINE inline
#define KDT_INLINE_LAMBDA
#else
#define KDT_INLINE [[gnu::always_inline]] inline
#define KDT_INLINE_LAMBDA __attribute__((always_inline))
#endif
#define KDT_NOINLINE [[gnu::noinline]]
#define KDT_UNROLL _Pragma("GCC unroll 8")

namespace kdt::cpu {
namespace KDT_ISA {
namespace {

#include KDT_VEC_HEADER

#include "backend/cpu/math.inc.h"

#include "backend/cpu/dots.inc.h"

#include "backend/cpu/attend.inc.h"

#include "backend/cpu/rows.inc.h"

}  // namespace
}  // namespace KDT_ISA

const Kernels KDT_TABLE = {
    .name = KDT_NAME,
    .dots = KDT_ISA::dots,
    .attend = KDT_ISA::attend,
    .scale_rows = KDT_ISA::scale_rows,
    .sum_of_squares = KDT_ISA::sum_of_squares,
    .scale_by = KDT_ISA::scale_by,
    .silu_mul = KDT_ISA::silu_mul,
    .sigmoid = KDT_ISA::sigmoid,
    .scale_to = KDT_ISA::scale_to,
    .axpy = KDT_ISA::axpy,
    .add = KDT_ISA::add_to,
    .widen_row = KDT_ISA::widen_row,
    .scan = KDT_ISA::scan,
    .shift_divide = KDT_ISA::shift_divide,
    .exp_sum = KDT_ISA::exp_sum,
    .lane_sum = KDT_ISA::sum_lanes,
    .exp_each = KDT_ISA::exp_each,
    .log_each = KDT_ISA::log_each,
    .find_at_least = KDT_ISA::find_at_least,
    .gumbel_argmax = KDT_ISA::gumbel_argmax,
    .philox = KDT_ISA::philox,
    .gumbel_each = KDT_ISA::gumbel_each,
    .stream_sum = KDT_ISA::stream_sum,
};

}  // namespace kdt::cpu
