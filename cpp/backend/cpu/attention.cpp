// Multi-head latent attention of the CPU backend: writing latents, absorbing queries, attending.
#include <cmath>
#include <cstring>

#include "backend/cpu/linear.h"
#include "backend/cpu/rotate.h"
#include "core/error.h"

namespace kdt::cpu {

// Keys and slots are addresses: a wrong index would read or write foreign memory.
void CpuBackend::check_batch(const RowBatch& batch, const LatentCache& cache, int rows) const {
    const int positions = cache.pages_per_sequence * kPageSize;
    for (int i = 0; i < rows; ++i) {
        const int ancestors = batch.ancestor_count[i];
        if (ancestors < 0 || ancestors > kMaxAncestors)
            fail(ErrorCode::invalid_argument, "row %d has %d ancestors; 0 to %d were expected", i, ancestors,
                 kMaxAncestors);
        if (ancestors > 0 && i >= kMaxTreeRows)
            fail(ErrorCode::invalid_argument, "row %d is a tree row; scratch has %d rows", i, kMaxTreeRows);
        for (int a = 0; a < ancestors; ++a)
            if (const int row = batch.ancestors[i * kMaxAncestors + a]; row < 0 || row >= kMaxTreeRows)
                fail(ErrorCode::invalid_argument,
                     "row %d has scratch row %d as an ancestor; scratch has %d rows", i, row, kMaxTreeRows);
        if (batch.prefix[i] < 0 || batch.prefix[i] > positions || batch.prefix[i] + ancestors < 1)
            fail(ErrorCode::invalid_argument,
                 "row %d sees %d committed positions and %d ancestors; the pages hold %d", i, batch.prefix[i],
                 ancestors, positions);
        if (ancestors == 0 && (batch.position[i] < 0 || batch.position[i] >= positions))
            fail(ErrorCode::invalid_argument, "row %d stands at position %d; the pages hold %d", i,
                 batch.position[i], positions);
        const int32_t* pages =
            cache.page_table + static_cast<ptrdiff_t>(batch.sequence[i]) * cache.pages_per_sequence;
        const int used = ancestors == 0 ? std::max(batch.prefix[i], batch.position[i] + 1) : batch.prefix[i];
        for (int p = 0; p * kPageSize < used; ++p)
            if (pages[p] < 0 || pages[p] >= cache.page_count)
                fail(ErrorCode::invalid_argument,
                     "row %d needs page %d of sequence %d, which is %d of %d pages", i, p, batch.sequence[i],
                     pages[p], cache.page_count);
    }
}

void CpuBackend::write_latent(const WriteLatentArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    const int width = args.latent + args.rope.rope;
    check_positions(args.batch.position, rows, args.rope);
    check_batch(args.batch, args.cache, rows);
    pool_.split(rows, 16, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) {
            const float* ckv = args.ckv + i * width;
            const int position = args.batch.position[i];
            float* to;
            if (args.batch.ancestor_count[i] > 0) {
                to = static_cast<float*>(args.cache.scratch) + i * width;
            } else {
                const int page = args.cache.page_table[static_cast<ptrdiff_t>(args.batch.sequence[i]) *
                                                           args.cache.pages_per_sequence +
                                                       position / kPageSize];
                to = static_cast<float*>(args.cache.pages) +
                     (static_cast<ptrdiff_t>(page) * kPageSize + position % kPageSize) * width;
            }
            const float mean = k_.sum_of_squares(ckv, args.latent) / static_cast<float>(args.latent);
            k_.scale_by(ckv, 1.0f / std::sqrt(mean + args.eps), args.weight, args.latent, to);
            rotate(args.rope, position, ckv + args.latent, to + args.latent);
        }
    });
}

void CpuBackend::absorb_query(const AbsorbQueryArgs& args) {
    const Op op(*this);
    const PackedMatrix& w = packed(args.key_up);
    const int rope = args.rope.rope;
    if (w.in != args.nope || w.out != args.heads * args.latent)
        fail(ErrorCode::invalid_argument, "key_up is [%d, %d]; [%d * %d, %d] was expected", w.out, w.in,
             args.heads, args.latent, args.nope);
    HeadLinear h;
    h.rows = live_rows(args.rows);
    check_positions(args.batch.position, h.rows, args.rope);
    h.groups = args.heads;
    h.count = args.latent;
    h.x = args.q;
    h.x_group = args.nope + rope;
    h.x_row = args.heads * h.x_group;
    h.w = w;
    h.out = args.out;
    h.out_group = args.latent + rope;
    h.out_row = args.heads * h.out_group;
    head_linear(h);
    pool_.split(h.rows, std::max(1, 256 / args.heads), [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i)
            for (int head = 0; head < args.heads; ++head)
                rotate(args.rope, args.batch.position[i], args.q + i * h.x_row + head * h.x_group + args.nope,
                       args.out + i * h.out_row + head * h.out_group + args.latent);
    });
}

// The key at a place of the row's virtual sequence: the committed prefix, then its ancestors by depth.
const float* CpuBackend::key_at(const RowBatch& batch, const LatentCache& cache, int row, int place,
                                int width) const {
    const int prefix = batch.prefix[row];
    if (place >= prefix) {
        const int scratch = batch.ancestors[row * kMaxAncestors + (place - prefix)];
        return static_cast<const float*>(cache.scratch) + static_cast<ptrdiff_t>(scratch) * width;
    }
    const int page = cache.page_table[static_cast<ptrdiff_t>(batch.sequence[row]) * cache.pages_per_sequence +
                                      place / kPageSize];
    return static_cast<const float*>(cache.pages) +
           (static_cast<ptrdiff_t>(page) * kPageSize + place % kPageSize) * width;
}

// Rows go through a chunk one after the other, so that a chunk of the shared prefix stays in the cache.
void CpuBackend::attend_block(const AttendArgs& args, int first_row, int rows, int first_head,
                              int heads) const {
    const int width = args.latent + args.rope;
    float m[kAttendRows][kMaxQueries];
    float l[kAttendRows][kMaxQueries];
    int keys[kAttendRows];
    int most = 0;
    for (int r = 0; r < rows; ++r) {
        keys[r] = args.batch.prefix[first_row + r] + args.batch.ancestor_count[first_row + r];
        most = std::max(most, keys[r]);
    }
    const float* q[kMaxQueries];
    float* o[kMaxQueries];
    const auto point_at = [&](int row) {
        for (int h = 0; h < heads; ++h) {
            const ptrdiff_t at = static_cast<ptrdiff_t>(row) * args.heads + first_head + h;
            q[h] = args.q + at * width;
            o[h] = args.out + at * args.latent;
        }
    };
    for (int start = 0; start < most; start += kChunkSize) {
        for (int r = 0; r < rows; ++r) {
            if (start >= keys[r]) continue;
            const int row = first_row + r;
            const float* key[kChunkSize];
            const int count = std::min(kChunkSize, keys[r] - start);
            for (int j = 0; j < count; ++j) key[j] = key_at(args.batch, args.cache, row, start + j, width);
            point_at(row);
            AttendJob job;
            job.q = q;
            job.o = o;
            job.m = m[r];
            job.l = l[r];
            job.n = heads;
            job.key = job.value = key;
            job.count = count;
            job.key_width = width;
            job.value_width = args.latent;
            job.scale = args.scale;
            job.first = start == 0;
            k_.attend(job);
        }
    }
    for (int r = 0; r < rows; ++r) {
        point_at(first_row + r);
        k_.scale_rows(o, l[r], heads, args.latent);
    }
}

void CpuBackend::attend(const AttendArgs& args) {
    const Op op(*this);
    const int rows = live_rows(args.rows);
    check_batch(args.batch, args.cache, rows);
    const int row_blocks = (rows + kAttendRows - 1) / kAttendRows;
    int heads = kMaxQueries;  // of an item: fewer where that keeps every thread busy
    while (heads > 4 &&
           static_cast<int64_t>(row_blocks) * ((args.heads + heads - 1) / heads) < pool_.size() * 2)
        heads /= 2;
    const int head_blocks = (args.heads + heads - 1) / heads;
    pool_.split(static_cast<int64_t>(row_blocks) * head_blocks, 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t item = begin; item < end; ++item) {
            const int row = static_cast<int>(item / head_blocks) * kAttendRows;
            const int head = static_cast<int>(item % head_blocks) * heads;
            attend_block(args, row, std::min(kAttendRows, rows - row), head,
                         std::min(heads, args.heads - head));
        }
    });
}

}  // namespace kdt::cpu
