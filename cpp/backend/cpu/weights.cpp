// Checks weights and brings them into the layout of kernels.h, once.
#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "core/error.h"

namespace kdt::cpu {

namespace {

constexpr int kNoRow = INT32_MAX;

// Where a value that is not finite stands; the packers look for none and remember the first.
struct Offender {
    std::atomic<int> row{kNoRow};
    void report(int r) {
        int seen = row.load();
        while (r < seen && !row.compare_exchange_weak(seen, r)) {
        }
    }
};

bool finite_bits(uint32_t bits) {
    return (bits & 0x7F800000u) != 0x7F800000u;
}

// Packs rows 4 * block .. of a source matrix with `in` columns; rows past the last are zeros.
void pack_f32(const float* source, int out, int in, int block, uint8_t* to, Offender& offender) {
    const int units = (in + kLanes - 1) / kLanes;
    for (int o = 0; o < kBlockOutputs; ++o) {
        const int row = block * kBlockOutputs + o;
        bool bad = false;
        for (int u = 0; u < units; ++u) {
            uint32_t lanes[kLanes] = {};
            const int n = std::min(kLanes, in - u * kLanes);
            if (row < out)
                std::memcpy(lanes, source + static_cast<size_t>(row) * in + u * kLanes,
                            static_cast<size_t>(n) * 4);
            for (uint32_t bits : lanes) bad |= !finite_bits(bits);
            std::memcpy(to + (static_cast<size_t>(u) * kBlockOutputs + o) * 64, lanes, 64);
        }
        if (bad) offender.report(row);
    }
}

void pack_bf16(const uint16_t* source, int out, int in, int block, uint8_t* to, Offender& offender) {
    constexpr int kUnit = 2 * kLanes;
    const int units = (in + kUnit - 1) / kUnit;
    for (int o = 0; o < kBlockOutputs; ++o) {
        const int row = block * kBlockOutputs + o;
        bool bad = false;
        for (int u = 0; u < units; ++u) {
            uint16_t values[kUnit] = {};
            const int n = std::min(kUnit, in - u * kUnit);
            if (row < out)
                std::memcpy(values, source + static_cast<size_t>(row) * in + u * kUnit,
                            static_cast<size_t>(n) * 2);
            uint32_t words[kLanes];
            for (int l = 0; l < kLanes; ++l) {
                words[l] = values[l] | static_cast<uint32_t>(values[l + kLanes]) << 16;
                bad |= (values[l] & 0x7F80u) == 0x7F80u || (values[l + kLanes] & 0x7F80u) == 0x7F80u;
            }
            std::memcpy(to + (static_cast<size_t>(u) * kBlockOutputs + o) * 64, words, 64);
        }
        if (bad) offender.report(row);
    }
}

// An 8 x 8 matrix of nibbles, a row a word: row j, column k -> row k, column j.
void transpose_nibbles(uint32_t* row) {
    const auto swap = [row](int a, int b, int shift, uint32_t mask) {
        const uint32_t t = (row[a] >> shift ^ row[b]) & mask;
        row[b] ^= t;
        row[a] ^= t << shift;
    };
    for (int j = 0; j < 4; ++j) swap(j, j + 4, 16, 0x0000FFFFu);
    for (int j = 0; j < 8; j += j % 4 == 1 ? 3 : 1) swap(j, j + 2, 8, 0x00FF00FFu);
    for (int j = 0; j < 8; j += 2) swap(j, j + 1, 4, 0x0F0F0F0Fu);
}

// Lane l of a unit holds input 16 j + l in nibble j. Of the file's words, 2 j + l / 8 has it in nibble l % 8:
// the words of even number and those of odd number are a transpose each.
void pack_w4(const uint32_t* source, int out, int in, int block, uint8_t* to) {
    constexpr int kUnit = 8 * kLanes;
    const int units = (in + kUnit - 1) / kUnit;
    for (int o = 0; o < kBlockOutputs; ++o) {
        const int row = block * kBlockOutputs + o;
        for (int u = 0; u < units; ++u) {
            uint32_t nibbles[kLanes] = {};  // of 128 inputs, as files store them
            if (row < out) {
                const uint32_t* from =
                    source + (static_cast<size_t>(row) * in + static_cast<size_t>(u) * kUnit) / 8;
                const int used = std::min(kUnit, in - u * kUnit) / 8;  // words that exist
                if (used == kLanes)
                    std::memcpy(nibbles, from, sizeof nibbles);  // of a size that the compiler knows
                else
                    std::memcpy(nibbles, from, static_cast<size_t>(used) * 4);
                for (int w = 0; w < used; ++w) nibbles[w] ^= 0x88888888u;  // offset 8 to two's complement
            }
            uint32_t words[kLanes];
            for (int j = 0; j < 8; ++j) {
                words[j] = nibbles[2 * j];
                words[8 + j] = nibbles[2 * j + 1];
            }
            transpose_nibbles(words);
            transpose_nibbles(words + 8);
            std::memcpy(to + (static_cast<size_t>(u) * kBlockOutputs + o) * 64, words, 64);
        }
    }
}

// Whether 8 times a scale (the largest weight that it can make) is finite: its exponent leaves room for 3
// more.
bool usable_scale(uint32_t f32_bits) {
    return (f32_bits & 0x7F800000u) < (252u << 23);
}

// Scales of a block, [unit, output, 4]; `size` bytes each.
void pack_scales(const uint8_t* source, size_t size, int out, int in, int block, uint8_t* to,
                 Offender& offender) {
    const int groups = in / kGroupSize;
    const int units = (groups + 3) / 4;
    std::memset(to, 0, static_cast<size_t>(units) * kBlockOutputs * 4 * size);
    for (int o = 0; o < kBlockOutputs && block * kBlockOutputs + o < out; ++o) {
        const int row = block * kBlockOutputs + o;
        const uint8_t* from = source + static_cast<size_t>(row) * static_cast<size_t>(groups) * size;
        bool usable = true;
        for (int g = 0; g < groups; ++g) {
            uint32_t bits = 0;
            if (size == 4) {
                std::memcpy(&bits, from + static_cast<size_t>(g) * 4, 4);
            } else {  // a bf16 is the upper half of a float32
                uint16_t half;
                std::memcpy(&half, from + static_cast<size_t>(g) * 2, 2);
                bits = static_cast<uint32_t>(half) << 16;
            }
            usable &= usable_scale(bits);
        }
        if (!usable) offender.report(row);
        for (int u = 0; u < units; ++u) {
            uint8_t* unit = to + (static_cast<size_t>(u) * kBlockOutputs + static_cast<size_t>(o)) * 4 * size;
            const auto n = static_cast<size_t>(std::min(4, groups - 4 * u));
            if (n == 4 && size == 2)
                std::memcpy(unit, from + static_cast<size_t>(u) * 8, 8);
            else
                std::memcpy(unit, from + static_cast<size_t>(u) * 4 * size, n * size);
        }
    }
}

}  // namespace

Weight CpuBackend::upload_matrix(const HostMatrix& matrix, const std::string& name) {
    const Op op(*this);
    if (matrix.out < 1 || matrix.in < 1)
        fail(ErrorCode::bad_model, "%s has shape [%d, %d]; a matrix needs at least one row and one column",
             name.c_str(), matrix.out, matrix.in);
    if (matrix.data == nullptr) fail(ErrorCode::bad_model, "%s has no data", name.c_str());
    const bool w4 = matrix.kind == WeightKind::w4a16;
    if (w4 && matrix.in % kGroupSize != 0)
        fail(ErrorCode::bad_model, "%s has %d inputs; INT4 weights come in groups of %d", name.c_str(),
             matrix.in, kGroupSize);
    if (w4 && matrix.scales == nullptr) fail(ErrorCode::bad_model, "%s has no scales", name.c_str());
    if (w4 && matrix.scale_dtype != DType::f32 && matrix.scale_dtype != DType::bf16)
        fail(ErrorCode::bad_model, "%s has scales of type %s; f32 or bf16 was expected", name.c_str(),
             dtype_name(matrix.scale_dtype));

    auto stored = std::make_unique<StoredMatrix>();
    PackedMatrix& p = stored->packed;
    p.format = matrix.kind == WeightKind::f32     ? Format::f32
               : matrix.kind == WeightKind::bf16  ? Format::bf16
               : matrix.scale_dtype == DType::f32 ? Format::w4_f32
                                                  : Format::w4_bf16;
    p.out = matrix.out;
    p.in = matrix.in;
    const int unit = kLanes * unit_steps(p.format);
    const size_t units = (static_cast<size_t>(p.in) + unit - 1) / unit;
    const size_t blocks = (static_cast<size_t>(p.out) + kBlockOutputs - 1) / kBlockOutputs;
    const size_t block_bytes = units * kBlockOutputs * 64;
    const size_t scale_size = w4 ? dtype_size(matrix.scale_dtype) : 0;
    const size_t scale_bytes = units * kBlockOutputs * 4 * scale_size;
    stored->data = Array<uint8_t>(blocks * block_bytes, name.c_str());
    p.data = stored->data.data();
    p.scales = nullptr;
    if (w4) {
        stored->scales = Array<uint8_t>(blocks * scale_bytes, name.c_str());
        p.scales = stored->scales.data();
    }

    Offender offender;
    const int64_t grain = std::max<int64_t>(1, (int64_t{1} << 18) / static_cast<int64_t>(block_bytes));
    pool_.split(static_cast<int64_t>(blocks), grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t b = begin; b < end; ++b) {
            const int block = static_cast<int>(b);
            uint8_t* to = stored->data.data() + static_cast<size_t>(b) * block_bytes;
            switch (matrix.kind) {
                case WeightKind::f32:
                    pack_f32(static_cast<const float*>(matrix.data), p.out, p.in, block, to, offender);
                    break;
                case WeightKind::bf16:
                    pack_bf16(static_cast<const uint16_t*>(matrix.data), p.out, p.in, block, to, offender);
                    break;
                case WeightKind::w4a16:
                    pack_w4(static_cast<const uint32_t*>(matrix.data), p.out, p.in, block, to);
                    pack_scales(static_cast<const uint8_t*>(matrix.scales), scale_size, p.out, p.in, block,
                                stored->scales.data() + static_cast<size_t>(b) * scale_bytes, offender);
                    break;
            }
        }
    });
    if (const int row = offender.row.load(); row != kNoRow)
        fail(ErrorCode::not_finite, "%s has %s in row %d of %d", name.c_str(),
             w4 ? "a scale that is NaN, infinite or so large that its weights are" : "NaN or infinity", row,
             p.out);

    weight_bytes_ += blocks * (block_bytes + scale_bytes);
    Weight weight;
    weight.kind = matrix.kind;
    weight.out = p.out;
    weight.in = p.in;
    weight.data = stored.get();
    weight.scales = p.scales;
    weight.scale_dtype = matrix.scale_dtype;
    matrices_.push_back(std::move(stored));
    return weight;
}

const float* CpuBackend::upload_vector(std::span<const float> values, const std::string& name) {
    const Op op(*this);
    for (size_t i = 0; i < values.size(); ++i)
        if (!std::isfinite(values[i]))
            fail(ErrorCode::not_finite, "%s has %g at index %zu", name.c_str(),
                 static_cast<double>(values[i]), i);
    Array<float> copy(values.size(), name.c_str());
    std::memcpy(copy.data(), values.data(), values.size_bytes());
    weight_bytes_ += values.size_bytes();
    vectors_.push_back(std::move(copy));
    return vectors_.back().data();
}

ExpertSet CpuBackend::make_experts(std::span<const Weight> gate, std::span<const Weight> up,
                                   std::span<const Weight> down, const std::string& name) {
    const Op op(*this);
    if (gate.empty() || gate.size() != up.size() || gate.size() != down.size())
        fail(ErrorCode::bad_model,
             "%s has %zu gate, %zu up and %zu down matrices; the same number was expected", name.c_str(),
             gate.size(), up.size(), down.size());
    auto stored = std::make_unique<StoredExperts>();
    for (size_t e = 0; e < gate.size(); ++e) {
        const PackedMatrix &g = packed(gate[e]), &u = packed(up[e]), &d = packed(down[e]);
        if (g.in != gate[0].in || g.out != gate[0].out || u.in != g.in || u.out != g.out || d.in != g.out ||
            d.out != g.in)
            fail(ErrorCode::bad_model,
                 "%s: expert %zu has gate [%d, %d], up [%d, %d], down [%d, %d]; gate and up [%d, %d] and "
                 "down its "
                 "transpose's shape were expected",
                 name.c_str(), e, g.out, g.in, u.out, u.in, d.out, d.in, gate[0].out, gate[0].in);
        stored->gate.push_back(g);
        stored->up.push_back(u);
        stored->down.push_back(d);
    }
    ExpertSet set;
    set.count = static_cast<int>(gate.size());
    set.hidden = gate[0].in;
    set.intermediate = gate[0].out;
    set.table = stored.get();
    expert_sets_.push_back(std::move(stored));
    return set;
}

}  // namespace kdt::cpu
