// The KDTR reader on hostile bytes.
//
// A file is accepted or refused with a rule, never anything else; what is accepted can be read to its last
// byte; and reading allocates no more than a few times the index, which lies inside the file. The mutator
// knows the layout: it moves fields to edges and usually makes sizes and checksums true again, since random
// bytes get no further than the header's checksum.
#include <sanitizer/allocator_interface.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "core/checked.h"
#include "core/crc32c.h"
#include "core/kdtr_format.h"
#include "fuzz/check.h"

using namespace kdt;

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace {

bool counting = false;
size_t allocated = 0;
size_t largest = 0;

void on_malloc(const volatile void*, size_t bytes) {
    if (!counting) return;
    allocated += bytes;
    largest = std::max(largest, bytes);
}

void on_free(const volatile void*) {}

[[maybe_unused]] const int installed = __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);

// Reads every byte and every number that a user of an accepted file would.
void use(const KdtrFile& file, std::span<const std::byte> bytes) {
    KDT_FUZZ_CHECK(file.names().size() == file.tensors().size());
    unsigned sum = 0;
    for (size_t i = 0; i < file.names().size(); ++i) {
        const TensorView& tensor = file.tensors()[i];
        KDT_FUZZ_CHECK(file.find(file.names()[i]) == &tensor);
        KDT_FUZZ_CHECK(kdtr::name_rule(file.names()[i]) == nullptr);
        KDT_FUZZ_CHECK(i == 0 || file.names()[i - 1] < file.names()[i]);
        KDT_FUZZ_CHECK(tensor.shape.size() <= kdtr::kMaxRank);
        const auto elements = static_cast<uint64_t>(tensor.elements());
        KDT_FUZZ_CHECK(tensor.bytes == elements * dtype_size(tensor.dtype) && dtype_size(tensor.dtype) > 0);
        const auto* at = static_cast<const std::byte*>(tensor.data);
        KDT_FUZZ_CHECK(at >= bytes.data() + sizeof(kdtr::Header) && at <= bytes.data() + bytes.size());
        KDT_FUZZ_CHECK((at - bytes.data()) % kdtr::kAlignment == 0);
        for (size_t b = 0; b < tensor.bytes; ++b) sum += static_cast<unsigned>(at[b]);
    }
    KDT_FUZZ_CHECK(file.find("") == nullptr);
    volatile unsigned sink = sum;
    (void)sink;
}

struct Field {
    size_t at, width;
};
constexpr Field kHeaderFields[] = {{8, 2},  {10, 2}, {12, 4}, {16, 8}, {24, 8}, {32, 8},
                                   {40, 8}, {48, 4}, {52, 2}, {54, 1}, {55, 1}};
constexpr Field kRecordFields[] = {{0, 4},  {4, 2},  {6, 1},  {7, 1},  {8, 8},  {16, 8}, {24, 8}, {32, 8},
                                   {40, 8}, {48, 8}, {56, 8}, {64, 8}, {72, 8}, {80, 8}, {88, 4}, {92, 4}};
constexpr uint64_t kEdges[] = {0,
                               1,
                               8,
                               9,
                               63,
                               64,
                               65,
                               96,
                               127,
                               128,
                               255,
                               256,
                               1 << 16,
                               1 << 20,
                               1 << 26,
                               uint64_t{1} << 32,
                               uint64_t{1} << 40,
                               uint64_t{1} << 62,
                               uint64_t{1} << 63,
                               ~uint64_t{0}};

template <class T, size_t N>
const T& pick(const T (&from)[N], std::minstd_rand& random) {
    return from[random() % N];
}

void change_field(uint8_t* data, size_t size, std::minstd_rand& random) {
    const size_t records = (size - sizeof(kdtr::Header)) / sizeof(kdtr::Record);
    Field field = pick(kHeaderFields, random);
    if (records > 0 && random() % 3 != 0) {
        field = pick(kRecordFields, random);
        field.at += sizeof(kdtr::Header) + random() % std::min<size_t>(records, 8) * sizeof(kdtr::Record);
    }
    uint64_t value = 0;
    std::memcpy(&value, data + field.at, field.width);
    if (random() % 2) {
        value = pick(kEdges, random) - random() % 2;
    } else {
        constexpr uint64_t kSteps[] = {1, 8, 64, ~uint64_t{0}, ~uint64_t{7}, ~uint64_t{63}};
        value += pick(kSteps, random);
    }
    std::memcpy(data + field.at, &value, field.width);
}

void make_checksums_true(uint8_t* data, size_t size) {
    kdtr::Header header;
    std::memcpy(&header, data, sizeof header);
    const size_t rest = size - sizeof header;
    if (header.index_bytes <= rest) {
        header.index_crc = crc32c(data + sizeof header, header.index_bytes);
        std::memcpy(data, &header, sizeof header);
    }
    header.header_crc = crc32c(data, kdtr::kHeaderCrcAt);
    std::memcpy(data, &header, sizeof header);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    const std::span<const std::byte> bytes(reinterpret_cast<const std::byte*>(data), size);
    allocated = largest = 0;
    counting = true;
    try {
        const KdtrFile file = KdtrFile::parse(bytes, "fuzz");
        counting = false;
        use(file, bytes);
        file.verify_checksums();
    } catch (const KdtrError& error) {
        counting = false;
        KDT_FUZZ_CHECK(error.code() == ErrorCode::bad_file);
        const std::string start = std::string("fuzz: [") + error.rule() + "] ";
        KDT_FUZZ_CHECK(std::string(error.what()).starts_with(start));
    }
    // A copy of the index, then 128 bytes a tensor at most (a view, a name and a shape) for 96 in the file.
    KDT_FUZZ_CHECK(largest <= std::max<size_t>(size, 4096));
    KDT_FUZZ_CHECK(allocated <= 4096 + 3 * size);
    return 0;
}

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size, unsigned seed) {
    std::minstd_rand random(seed);
    random.discard(2);
    if (size < sizeof(kdtr::Header) || random() % 3 == 0) {
        size = LLVMFuzzerMutate(data, size, max_size);
    } else {
        for (auto changes = 1 + random() % 2; changes > 0; --changes) change_field(data, size, random);
    }
    if (size >= sizeof(kdtr::Header)) {
        const uint64_t file_bytes = size;
        if (random() % 4 != 0)
            std::memcpy(data + offsetof(kdtr::Header, file_bytes), &file_bytes, sizeof file_bytes);
        if (random() % 8 != 0) make_checksums_true(data, size);
    }
    return size;
}
