// The draft model's ops of the CPU backend: taps that wait, keys and values, attention of a block.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backend/cpu/cpu_backend.h"
#include "backend/cpu/rotate.h"
#include "core/error.h"

namespace kdt::cpu {

namespace {

void in_range(const char* what, int value, int low, int high) {
    if (value < low || value > high)
        fail(ErrorCode::invalid_argument, "%s is %d; %d to %d was expected", what, value, low, high);
}

void check_heads(int heads, const RopeTable& rope) {
    if (heads < 1 || rope.rope < 2 || rope.rope % 2 != 0)
        fail(ErrorCode::invalid_argument, "%d heads of %d values; at least one head of an even number", heads,
             rope.rope);
}

// Where entries of a draft cache lie.
struct Entries {
    float* pages;
    float* block;
    const int32_t* page;  // of the sequence
    int page_count, pages_per_sequence;
    int width;  // of an entry

    Entries(const DraftCache& cache, int sequence, int kv_heads, int head_dim)
        : pages(static_cast<float*>(cache.pages)),
          block(static_cast<float*>(cache.block)),
          page(cache.page_table + static_cast<ptrdiff_t>(sequence) * cache.pages_per_sequence),
          page_count(cache.page_count),
          pages_per_sequence(cache.pages_per_sequence),
          width(2 * kv_heads * head_dim) {}

    float* at_position(int position) const {
        const ptrdiff_t slot =
            static_cast<ptrdiff_t>(page[position / kPageSize]) * kPageSize + position % kPageSize;
        return pages + slot * width;
    }
    float* at_block(int entry) const { return block + static_cast<ptrdiff_t>(entry) * width; }

    // Positions are addresses: a wrong one would read or write foreign memory.
    void check(int first, int last) const {
        in_range("a position of the draft cache", first, 0, pages_per_sequence * kPageSize - 1);
        in_range("a position of the draft cache", last, 0, pages_per_sequence * kPageSize - 1);
        for (int p = first / kPageSize; p <= last / kPageSize; ++p)
            in_range("a page of the draft cache", page[p], 0, page_count - 1);
    }
};

}  // namespace

void CpuBackend::keep_taps(const KeepTapsArgs& args) {
    const Op op(*this);
    const int length = *args.length;
    in_range("the number of taps to keep", length, 0, kMaxTreeRows);
    if (length == 0) return;
    in_range("the row of the first tap to keep", *args.first, 0, args.capacity - length);
    for (int j = 0; j < length; ++j) in_range("a row of taps", args.path[j], 0, kMaxTreeRows - 1);
    const size_t bytes = static_cast<size_t>(args.width) * sizeof(float);
    for (int j = 0; j < length; ++j)
        std::memcpy(args.kept + static_cast<ptrdiff_t>(*args.first + j) * args.width,
                    args.taps + static_cast<ptrdiff_t>(args.path[j]) * args.width, bytes);
}

void CpuBackend::norm_rotate(const NormRotateArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    const int dim = args.rope.rope;
    check_heads(args.heads, args.rope);
    check_positions(args.position, rows, args.rope);
    const int64_t grain = std::max(1, (1 << 13) / (args.heads * dim));
    pool_.split(rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            for (int h = 0; h < args.heads; ++h) {
                const float* x = args.x + (i * args.heads + h) * dim;
                float* out = args.out + (i * args.heads + h) * dim;
                const float mean = k_.sum_of_squares(x, dim) / static_cast<float>(dim);
                k_.scale_by(x, 1.0f / std::sqrt(mean + args.eps), args.weight, dim, out);
                rotate(args.rope, args.position[i], out, out);
            }
    });
}

void CpuBackend::write_key_value(const WriteKeyValueArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    const int dim = args.rope.rope, keys = args.kv_heads * dim;
    check_heads(args.kv_heads, args.rope);
    check_positions(args.position, rows, args.rope);
    const Entries entries(args.cache, *args.sequence, args.kv_heads, dim);
    if (args.to_block)
        in_range("the number of rows of a block", rows, 0, kMaxBlockRows);
    else
        for (int i = 0; i < rows; ++i) entries.check(args.position[i], args.position[i]);
    const int64_t grain = std::max(1, (1 << 13) / keys);
    pool_.split(rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            float* entry =
                args.to_block ? entries.at_block(static_cast<int>(i)) : entries.at_position(args.position[i]);
            for (int h = 0; h < args.kv_heads; ++h) {
                const float* k = args.k + i * keys + h * dim;
                const float mean = k_.sum_of_squares(k, dim) / static_cast<float>(dim);
                k_.scale_by(k, 1.0f / std::sqrt(mean + args.eps), args.weight, dim, entry + h * dim);
                rotate(args.rope, args.position[i], entry + h * dim, entry + h * dim);
            }
            std::memcpy(entry + keys, args.v + i * keys, static_cast<size_t>(keys) * sizeof(float));
        }
    });
}

void CpuBackend::block_attend(const BlockAttendArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    const int dim = args.head_dim, start = *args.start;
    if (args.kv_heads < 1 || args.heads % args.kv_heads != 0)
        fail(ErrorCode::invalid_argument, "%d query heads share %d key heads; a multiple was expected",
             args.heads, args.kv_heads);
    in_range("the number of entries of a block", args.block, 1, kMaxBlockRows);
    in_range("the attention window", args.window, 0, INT32_MAX);
    in_range("the number of committed positions", start, 0, args.cache.pages_per_sequence * kPageSize);
    const Entries entries(args.cache, *args.sequence, args.kv_heads, dim);

    struct Span {
        int first, last;
    };
    const auto visible = [&](int position) {
        Span span{0, start + args.block - 1};
        if (args.causal) span.last = std::min(span.last, position);
        if (args.window > 0) {
            span.first = std::max(span.first, position - (args.window - 1));
            if (span.last - position > args.window - 1) span.last = position + (args.window - 1);
        }
        return span;
    };
    for (int i = 0; i < rows; ++i) {
        in_range("the position of a row", args.position[i], 0, INT32_MAX - kMaxBlockRows);
        const Span span = visible(args.position[i]);
        if (span.last < span.first)
            fail(ErrorCode::invalid_argument, "row %d at position %d sees none of %d positions", i,
                 args.position[i], start + args.block);
        if (span.first < start) entries.check(span.first, std::min(span.last, start - 1));
    }

    const int group = args.heads / args.kv_heads;  // queries that share a key
    pool_.split(static_cast<int64_t>(rows) * args.kv_heads, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            const int row = static_cast<int>(item / args.kv_heads);
            const int head = static_cast<int>(item % args.kv_heads);
            const Span span = visible(args.position[row]);
            for (int first = 0; first < group; first += kMaxQueries) {
                const int n = std::min(kMaxQueries, group - first);
                const float* q[kMaxQueries];
                float* o[kMaxQueries];
                float m[kMaxQueries], l[kMaxQueries];
                for (int g = 0; g < n; ++g) {
                    const ptrdiff_t at =
                        (static_cast<ptrdiff_t>(row) * args.heads + head * group + first + g) * dim;
                    q[g] = args.q + at;
                    o[g] = args.out + at;
                }
                for (int chunk = span.first / kChunkSize; chunk * kChunkSize <= span.last; ++chunk) {
                    const int from = std::max(span.first, chunk * kChunkSize);
                    const int to = std::min(span.last, chunk * kChunkSize + kChunkSize - 1);
                    const float* key[kChunkSize];
                    const float* value[kChunkSize];
                    for (int p = from; p <= to; ++p) {
                        const float* entry = p < start ? entries.at_position(p) : entries.at_block(p - start);
                        key[p - from] = entry + head * dim;
                        value[p - from] = entry + (args.kv_heads + head) * dim;
                    }
                    AttendJob job;
                    job.q = q;
                    job.o = o;
                    job.m = m;
                    job.l = l;
                    job.n = n;
                    job.key = key;
                    job.value = value;
                    job.count = to - from + 1;
                    job.key_width = job.value_width = dim;
                    job.scale = args.scale;
                    job.first = from == span.first;
                    k_.attend(job);
                }
                k_.scale_rows(o, l, n, dim);
            }
        }
    });
}

}  // namespace kdt::cpu
