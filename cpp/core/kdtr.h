// KDTR v1: named tensors in one file (docs/formats/kdtr-v1.md).
//
// The reader refuses a file whole at the first rule that fails; before that it has allocated no more than a
// copy of the index. Tensors are views of the mapped file. The writer is deterministic and atomic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/error.h"
#include "core/tensor.h"

namespace kdt {

// `what()` is "FILE: [RULE] sentence". The code is `io` where the operating system said no, `bad_file` where
// a rule failed, `invalid_argument` where tensors to be written break one.
class KdtrError : public Error {
  public:
    KdtrError(ErrorCode code, const char* rule, const std::string& message)
        : Error(code, message), rule_(rule) {}
    const char* rule() const { return rule_; }  // "E_OVERLAP"

  private:
    const char* rule_;  // a string literal
};

class KdtrFile {
  public:
    // Maps a regular file and checks rules 1 to 38. Throws KdtrError.
    static KdtrFile open(const std::string& path);

    // The same (rules 4 to 38) for bytes in memory, which must stay alive and unchanged. Tensor data is
    // aligned for its type where the memory is 64-byte aligned. `label` stands for the file in messages.
    static KdtrFile parse(std::span<const std::byte> memory, std::string label);

    // The tensor of that name, or null. Valid as long as this object, moved or not.
    const TensorView* find(std::string_view name) const;

    // Names in file order (sorted), and the tensors in the same order.
    const std::vector<std::string_view>& names() const { return names_; }
    const std::vector<TensorView>& tensors() const { return tensors_; }
    const std::string& label() const { return label_; }

    // Rule 39 for every tensor. Throws KdtrError.
    void verify_checksums() const;

  private:
    std::string label_;
    std::shared_ptr<const void> mapping_;  // null after parse()
    std::vector<std::byte> index_;         // a copy: what was checked cannot change underfoot
    std::vector<std::string_view> names_;  // into index_
    std::vector<TensorView> tensors_;
};

struct NamedTensor {
    std::string_view name;
    TensorView tensor;
};

// Replaces `path` by a file with these tensors, in any order. Throws KdtrError and then leaves `path` as it
// was and nothing beside it.
void write_kdtr(const std::string& path, std::span<const NamedTensor> tensors);

}  // namespace kdt
