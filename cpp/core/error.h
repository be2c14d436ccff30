// One error type for the whole engine: a code that programs test, and one sentence that people read.
#pragma once

#include <stdexcept>
#include <string>

namespace kdt {

enum class ErrorCode {
    invalid_argument,  // the caller's value is out of range, or two values contradict each other
    bad_file,       // a file that fails a check; the message names file, field, value and what was expected
    bad_model,      // a tensor or config field that is missing, unknown, or of the wrong shape or dtype
    unsupported,    // well-formed, but this build, backend or device cannot do it
    out_of_memory,  // memory, KV pages or context: the message has the numbers
    not_finite,     // NaN or infinity where the result would depend on it
    io,             // the operating system said no
    internal,       // a bug of ours
};

const char* error_code_name(ErrorCode code);

class Error : public std::runtime_error {
  public:
    Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ErrorCode code() const { return code_; }

  private:
    ErrorCode code_;
};

// Throws Error with a printf-style message. The message is one sentence without a final full stop.
[[noreturn]] void fail(ErrorCode code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// printf into a std::string.
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));

}  // namespace kdt
