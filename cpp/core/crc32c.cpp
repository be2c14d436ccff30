#include "core/crc32c.h"

#include <array>
#include <bit>
#include <cstring>

namespace kdt {

namespace {

static_assert(std::endian::native == std::endian::little,
              "KDTR files are read in place: little-endian hosts only");

// table[k][b]: the register after byte b and then k zero bytes. Eight tables take eight bytes a step.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
    Tables tables{};
    for (uint32_t b = 0; b < 256; ++b) {
        uint32_t crc = b;
        for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82F63B78u : 0u);
        tables[0][b] = crc;
    }
    for (size_t k = 1; k < 8; ++k)
        for (size_t b = 0; b < 256; ++b) {
            const uint32_t crc = tables[k - 1][b];
            tables[k][b] = (crc >> 8) ^ tables[0][crc & 0xFF];
        }
    return tables;
}

constexpr Tables kTables = make_tables();

}  // namespace

uint32_t crc32c(const void* data, size_t bytes, uint32_t before) {
    const auto* at = static_cast<const unsigned char*>(data);
    uint32_t crc = ~before;
    for (; bytes >= 8; at += 8, bytes -= 8) {
        uint32_t low, high;
        std::memcpy(&low, at, 4);
        std::memcpy(&high, at + 4, 4);
        low ^= crc;
        crc = kTables[7][low & 0xFF] ^ kTables[6][(low >> 8) & 0xFF] ^ kTables[5][(low >> 16) & 0xFF] ^
              kTables[4][low >> 24] ^ kTables[3][high & 0xFF] ^ kTables[2][(high >> 8) & 0xFF] ^
              kTables[1][(high >> 16) & 0xFF] ^ kTables[0][high >> 24];
    }
    for (; bytes > 0; ++at, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xFF];
    return ~crc;
}

}  // namespace kdt
