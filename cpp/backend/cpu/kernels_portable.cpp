// The inner loops in plain C++: for machines without AVX2, and as a check on the other two.
#define KDT_ISA portable
#define KDT_VEC_HEADER "backend/cpu/vec_portable.h"
#define KDT_TABLE kPortableKernels
#define KDT_NAME "portable"
#include "backend/cpu/kernels.inc.h"
