#include "backend/backend.h"

#include <cstdlib>

#include "core/error.h"

namespace kdt {

namespace {

class ReplayedCalls final : public Graph {
  public:
    explicit ReplayedCalls(std::function<void()> ops) : ops_(std::move(ops)) {}
    void launch() override { ops_(); }

  private:
    const std::function<void()> ops_;
};

}  // namespace

size_t matrix_bytes(const Weight& weight) {
    const size_t n = static_cast<size_t>(weight.out) * static_cast<size_t>(weight.in);
    switch (weight.kind) {
        case WeightKind::f32:
            return n * 4;
        case WeightKind::bf16:
            return n * 2;
        case WeightKind::w4a16:
            return n / 2 + n / kGroupSize * dtype_size(weight.scale_dtype);
    }
    return 0;
}

void* Backend::allocate_host(size_t bytes, const char* what) {
    void* const memory = std::malloc(bytes > 0 ? bytes : 1);
    if (memory == nullptr)
        fail(ErrorCode::out_of_memory, "%s: %zu bytes of host memory could not be had", what, bytes);
    return memory;
}

void Backend::release_host(void* pointer) {
    std::free(pointer);
}

std::unique_ptr<Graph> Backend::record(std::function<void()> ops) {
    return std::make_unique<ReplayedCalls>(std::move(ops));
}

void Backend::no_draft_ops() const {
    fail(ErrorCode::unsupported, "the drafter's ops are not part of this backend (%s)", name().c_str());
}

void Backend::keep_taps(const KeepTapsArgs&) {
    no_draft_ops();
}

void Backend::norm_rotate(const NormRotateArgs&) {
    no_draft_ops();
}

void Backend::write_key_value(const WriteKeyValueArgs&) {
    no_draft_ops();
}

void Backend::block_attend(const BlockAttendArgs&) {
    no_draft_ops();
}

void Backend::reserve_block_attention(int, int, int, int, int) {}  // nothing to take by default

}  // namespace kdt
