// The inner loops with AVX-512 F, BW, DQ and VL: this file alone is compiled for it.
#include <immintrin.h>
#define KDT_ISA avx512
#define KDT_VEC_HEADER "backend/cpu/vec_avx512.h"
#define KDT_TABLE kAvx512Kernels
#define KDT_NAME "avx512"
#include "backend/cpu/kernels.inc.h"
