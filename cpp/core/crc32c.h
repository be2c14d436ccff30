// CRC-32C (Castagnoli): reflected polynomial 0x82F63B78, initial value and final xor 0xFFFFFFFF.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kdt {

// The checksum of `bytes` bytes. To continue over a second piece, pass the first piece's checksum as
// `before`.
uint32_t crc32c(const void* data, size_t bytes, uint32_t before = 0);

}  // namespace kdt
