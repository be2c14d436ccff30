#include "core/error.h"

#include <cstdarg>
#include <cstdio>

namespace kdt {

namespace {

std::string vformat(const char* format, va_list args) {
    va_list again;
    va_copy(again, args);
    const int length = std::vsnprintf(nullptr, 0, format, args);
    std::string text(length > 0 ? static_cast<size_t>(length) : 0, '\0');
    if (length > 0) std::vsnprintf(text.data(), text.size() + 1, format, again);
    va_end(again);
    return text;
}

}  // namespace

const char* error_code_name(ErrorCode code) {
    switch (code) {
        case ErrorCode::invalid_argument:
            return "invalid_argument";
        case ErrorCode::bad_file:
            return "bad_file";
        case ErrorCode::bad_model:
            return "bad_model";
        case ErrorCode::unsupported:
            return "unsupported";
        case ErrorCode::out_of_memory:
            return "out_of_memory";
        case ErrorCode::not_finite:
            return "not_finite";
        case ErrorCode::io:
            return "io";
        case ErrorCode::internal:
            return "internal";
    }
    return "unknown";
}

void fail(ErrorCode code, const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vformat(format, args);
    va_end(args);
    throw Error(code, text);
}

std::string format(const char* format, ...) {
    va_list args;
    va_start(args, format);
    std::string text = vformat(format, args);
    va_end(args);
    return text;
}

}  // namespace kdt
