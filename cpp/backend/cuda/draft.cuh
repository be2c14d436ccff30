// What the draft kernels share: where an entry lies, and which keys a row of the block sees.
#pragma once

#include "backend/cuda/draft.h"

namespace kdt::cuda {

// Slot of position p of the sequence, counted in entries from `pages`; -1 where there is no page.
__device__ __forceinline__ long long draft_slot(const DraftCache& cache, int sequence, int p) {
    const int index = p / kPageSize;
    if (p < 0 || index >= cache.pages_per_sequence) return -1;
    const int page = cache.page_table[static_cast<long long>(sequence) * cache.pages_per_sequence + index];
    if (page < 0 || page >= cache.page_count) return -1;
    return static_cast<long long>(page) * kPageSize + p % kPageSize;
}

// The entry at position p: in a page below `start`, in the block from there on; null where there is none.
__device__ __forceinline__ const unsigned char* draft_entry(const BlockAttentionArgs& a, int sequence,
                                                            int start, int p, int entry_bytes) {
    if (p < start) {
        const long long slot = draft_slot(a.cache, sequence, p);
        return slot < 0 ? nullptr : static_cast<const unsigned char*>(a.cache.pages) + slot * entry_bytes;
    }
    if (p - start >= a.block) return nullptr;
    return static_cast<const unsigned char*>(a.cache.block) + static_cast<long long>(p - start) * entry_bytes;
}

// Positions that a row sees: first .. last; none where last < first.
struct BlockSpan {
    int first, last;
};

__device__ __forceinline__ BlockSpan block_span(const BlockAttentionArgs& a, int start, int row) {
    const int position = __ldcg(a.position + row);
    BlockSpan span{0, start + a.block - 1};
    if (a.causal) span.last = min(span.last, position);
    if (a.window > 0) {
        span.first = max(0, position - (a.window - 1));
        if (span.last - position > a.window - 1) span.last = position + (a.window - 1);
    }
    return span;
}

}  // namespace kdt::cuda
