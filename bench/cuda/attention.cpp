// Attention over the latent cache, by rows of a tree.
#include <algorithm>

#include "core/error.h"
#include "groups.h"

namespace kdt::bench {

void time_attention(Bench& bench, int heads, const std::vector<int>& lengths, const std::vector<int>& rows) {
    const int latent = 512, rope = 64, width = latent + rope;
    for (const int kv : lengths) {
        const int pages = (kv + 63) / 64 + 2;
        const size_t cache_bytes = static_cast<size_t>(pages) * 64 * width * 2;
        const int sets = std::clamp(static_cast<int>((size_t{200} << 20) / cache_bytes), 1, 24);
        std::vector<uint16_t> values(static_cast<size_t>(pages) * 64 * width);
        for (uint16_t& v : values) v = static_cast<uint16_t>(0x3C00 + random_bits() % 0x380);
        std::vector<Buffer> caches;
        std::vector<int32_t> table(static_cast<size_t>(pages));
        for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = (i * 7 + 3) % pages;
        if (pages % 7 == 0)
            for (int i = 0; i < pages; ++i) table[static_cast<size_t>(i)] = pages - 1 - i;
        for (int s = 0; s < sets; ++s) {
            caches.emplace_back(bench.b, cache_bytes, "a benchmark");
            bench.b.upload(caches.back().as<void>(), values.data(), cache_bytes);
        }
        bench.b.synchronize();
        for (const int m : rows) {
            const size_t n = static_cast<size_t>(m);
            float* q = bench.floats(m, heads * width);
            float* out = bench.floats(m, heads * latent);
            const int32_t* live = bench.scalar(m);
            std::vector<int32_t> ancestors(n * kMaxAncestors, 0), count(n);
            for (size_t i = 0; i < n; ++i) {  // a binary tree's depths
                count[i] = 1;
                for (size_t p = i; p > 0; p = (p - 1) / 2) ++count[i];
                int at = count[i] - 1;
                for (size_t p = i;; p = (p - 1) / 2) {
                    ancestors[i * kMaxAncestors + static_cast<size_t>(at--)] = static_cast<int32_t>(p);
                    if (p == 0) break;
                }
            }
            RowBatch batch;
            batch.sequence = bench.ints(m);
            batch.prefix = bench.ints(m, kv);
            batch.ancestor_count = bench.array(count);
            batch.ancestors = bench.array(ancestors);
            std::vector<uint16_t> scratch(static_cast<size_t>(kMaxTreeRows) * width, 0x3C00);
            uint16_t* scratch_kv = bench.array(scratch);
            int32_t* page_table = bench.array(table);
            const double us = bench.time(sets, [&](int i) {
                const LatentCache cache{caches[static_cast<size_t>(i)].as<void>(), scratch_kv, page_table,
                                        pages, pages};
                bench.b.attend({{m, live}, batch, q, cache, heads, latent, rope, 0.1f, out});
            });
            const double flop = 2.0 * m * heads * kv * (width + latent);
            bench.report(format("attend %d heads, kv %d", heads, kv), m, us,
                         static_cast<double>(kv) * width * 2, flop, format("%.0f TFLOP/s", flop / us / 1e6));
            bench.clear();
        }
    }
}

}  // namespace kdt::bench
