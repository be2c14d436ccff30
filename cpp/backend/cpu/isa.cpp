#include <cstdlib>
#include <cstring>

#include "backend/cpu/kernels.h"
#include "core/error.h"

namespace kdt::cpu {

namespace {

bool has_avx2() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__)
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

}  // namespace

const Kernels& choose_kernels(const std::string& isa) {
    const char* from = "the option isa";
    std::string wanted = isa;
    if (wanted.empty() || wanted == "auto") {
        const char* environment = std::getenv("KDTREE_CPU_ISA");
        wanted = environment == nullptr || *environment == '\0' ? "auto" : environment;
        from = "the environment variable KDTREE_CPU_ISA";
    }
    if (wanted != "auto" && wanted != "portable" && wanted != "avx2" && wanted != "avx512")
        fail(ErrorCode::invalid_argument, "%s is '%s'; it must be auto, portable, avx2 or avx512", from,
             wanted.c_str());
    if (wanted == "portable") return kPortableKernels;
#if defined(__x86_64__)
    if (has_avx512() && (wanted == "auto" || wanted == "avx512")) return kAvx512Kernels;
    if (has_avx2() && (wanted == "auto" || wanted == "avx2")) return kAvx2Kernels;
#endif
    if (wanted == "auto") return kPortableKernels;
    fail(ErrorCode::unsupported, "%s asks for %s, which this machine does not have", from, wanted.c_str());
}

}  // namespace kdt::cpu
