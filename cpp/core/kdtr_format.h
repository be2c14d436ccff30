// Layout and shared rules of KDTR v1, for reader and writer (docs/formats/kdtr-v1.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/dtype.h"
#include "core/kdtr.h"

namespace kdt::kdtr {

inline constexpr char kMagic[4] = {'K', 'D', 'T', 'R'};
inline constexpr unsigned char kGuard[4] = {0x0D, 0x0A, 0x1A, 0x0A};
inline constexpr uint16_t kMajor = 1;
inline constexpr uint16_t kMinor = 0;
inline constexpr uint64_t kAlignment = 64;
inline constexpr uint64_t kMaxTensors = uint64_t{1} << 20;
inline constexpr uint64_t kMaxIndexBytes = uint64_t{1} << 26;
inline constexpr uint64_t kMaxDim = uint64_t{1} << 40;
inline constexpr uint64_t kMaxTensorBytes = (uint64_t{1} << 63) - 1;
inline constexpr size_t kMaxNameBytes = 255;
inline constexpr size_t kMaxRank = 8;

// Both structs have the file's layout on a little-endian host and are read and written by memcpy.
struct Header {
    char magic[4];
    unsigned char guard[4];
    uint16_t major;
    uint16_t minor;
    uint32_t header_bytes;
    uint64_t file_bytes;
    uint64_t index_offset;
    uint64_t index_bytes;
    uint64_t data_offset;
    uint32_t tensor_count;
    uint16_t alignment;
    uint8_t compatible;
    uint8_t incompatible;
    uint32_t index_crc;
    uint32_t header_crc;
};
inline constexpr size_t kHeaderCrcAt = 60;
static_assert(sizeof(Header) == 64 && offsetof(Header, header_crc) == kHeaderCrcAt);

struct Record {
    uint32_t name_offset;
    uint16_t name_bytes;
    uint8_t dtype;
    uint8_t rank;
    uint64_t dims[kMaxRank];
    uint64_t offset;
    uint64_t bytes;
    uint32_t crc;
    uint32_t reserved;
};
static_assert(sizeof(Record) == 96 && offsetof(Record, offset) == 72);

// Throws KdtrError with the message "LABEL: [RULE] sentence".
[[noreturn]] void refuse(ErrorCode code, const std::string& label, const char* rule, const char* format, ...)
    __attribute__((format(printf, 4, 5)));

// Rules 19, 21 and 22: the rule that a name breaks, or null.
const char* name_rule(std::string_view name);

// Rule 25: bytes of an element, or 0 where `dtype` is none of the seven.
size_t element_size(uint8_t dtype);

// Rules 27, 29 and 30: the product of the dims times `element` in `bytes`. Returns the rule that fails, or
// null.
const char* tensor_bytes(const uint64_t* dims, size_t rank, size_t element, uint64_t& bytes);

}  // namespace kdt::kdtr
