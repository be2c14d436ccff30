#include "core/kdtr_format.h"

#include <cstdarg>
#include <cstdio>

#include "core/checked.h"

namespace kdt::kdtr {

void refuse(ErrorCode code, const std::string& label, const char* rule, const char* format, ...) {
    char sentence[1024];  // numbers and checked names: longer than this only if a name is, and then cut
    va_list args;
    va_start(args, format);
    std::vsnprintf(sentence, sizeof sentence, format, args);
    va_end(args);
    throw KdtrError(code, rule, label + ": [" + rule + "] " + sentence);
}

namespace {

// The code point at `at`, which moves past it; -1 where the bytes are not UTF-8 (RFC 3629: shortest form, no
// surrogates, at most U+10FFFF).
int32_t next_code_point(std::string_view text, size_t& at) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned first = byte(at);
    int32_t point;
    size_t more;
    int32_t least;
    if (first < 0x80) {
        ++at;
        return static_cast<int32_t>(first);
    } else if (first >= 0xC2 && first <= 0xDF) {
        point = first & 0x1F, more = 1, least = 0x80;
    } else if (first >= 0xE0 && first <= 0xEF) {
        point = first & 0x0F, more = 2, least = 0x800;
    } else if (first >= 0xF0 && first <= 0xF4) {
        point = first & 0x07, more = 3, least = 0x10000;
    } else {
        return -1;
    }
    if (text.size() - at <= more) return -1;
    for (size_t i = 1; i <= more; ++i) {
        if ((byte(at + i) & 0xC0) != 0x80) return -1;
        point = (point << 6) | (byte(at + i) & 0x3F);
    }
    if (point < least || point > 0x10FFFF || (point >= 0xD800 && point <= 0xDFFF)) return -1;
    at += more + 1;
    return point;
}

}  // namespace

const char* name_rule(std::string_view name) {
    if (name.empty() || name.size() > kMaxNameBytes) return "E_NAME_LENGTH";
    bool forbidden = name.find("..") != std::string_view::npos;
    for (size_t at = 0; at < name.size();) {
        const int32_t point = next_code_point(name, at);
        if (point < 0) return "E_NAME_UTF8";
        if (point < 0x20 || (point >= 0x7F && point <= 0x9F) || point == '/' || point == '\\')
            forbidden = true;
    }
    return forbidden ? "E_NAME_CHARACTER" : nullptr;
}

size_t element_size(uint8_t dtype) {
    return dtype_size(static_cast<DType>(dtype));
}

const char* tensor_bytes(const uint64_t* dims, size_t rank, size_t element, uint64_t& bytes) {
    bool empty = false;
    bytes = element;
    for (size_t i = 0; i < rank; ++i)
        if (dims[i] > kMaxDim) return "E_DIM";
    for (size_t i = 0; i < rank; ++i) {
        if (dims[i] == 0) {
            empty = true;  // the other dims still count, so that no reader's own product of them overflows
        } else if (!checked_mul(bytes, dims[i], bytes) || bytes > kMaxTensorBytes) {
            return "E_OVERFLOW";
        }
    }
    if (empty) bytes = 0;
    return nullptr;
}

}  // namespace kdt::kdtr
