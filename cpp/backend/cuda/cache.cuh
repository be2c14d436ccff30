// Where a latent lies.
#pragma once

#include "backend/cuda/device.h"

namespace kdt::cuda {

// Slot of position `p` of `sequence`, counted in rows from `pages`; -1 where the sequence has no page.
__device__ __forceinline__ long long page_slot(const LatentCache& cache, int sequence, int p) {
    const int index = p / kPageSize;
    if (p < 0 || index >= cache.pages_per_sequence) return -1;
    const int page = cache.page_table[static_cast<long long>(sequence) * cache.pages_per_sequence + index];
    if (page < 0 || page >= cache.page_count) return -1;
    return static_cast<long long>(page) * kPageSize + p % kPageSize;
}

// Virtual position v of a row: its committed prefix, then its ancestors by depth. Returns the row of the
// cache that holds the key, or null past the end or where a page is missing.
__device__ __forceinline__ const unsigned char* key_row(const LatentCache& cache, const RowBatch& batch,
                                                        int row, int prefix, int ancestor_count, int v,
                                                        int row_bytes) {
    if (v < prefix) {
        const long long slot = page_slot(cache, batch.sequence[row], v);
        return slot < 0 ? nullptr : static_cast<const unsigned char*>(cache.pages) + slot * row_bytes;
    }
    if (v - prefix >= ancestor_count) return nullptr;
    const int scratch = batch.ancestors[static_cast<long long>(row) * kMaxAncestors + v - prefix];
    return static_cast<const unsigned char*>(cache.scratch) + static_cast<long long>(scratch) * row_bytes;
}

}  // namespace kdt::cuda
