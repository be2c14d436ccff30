// The inner loops with AVX2 and FMA (-mavx2 -mfma): this file alone is compiled for it.
#include <immintrin.h>
#define KDT_ISA avx2
#define KDT_VEC_HEADER "backend/cpu/vec_avx2.h"
#define KDT_TABLE kAvx2Kernels
#define KDT_NAME "avx2"
#include "backend/cpu/kernels.inc.h"
