#include "backend/backend.h"
#include "core/error.h"

namespace kdt {

std::unique_ptr<Backend> make_cpu_backend(const CpuOptions&) {
    fail(ErrorCode::unsupported, "the CPU backend is not part of this revision");
}

}  // namespace kdt
