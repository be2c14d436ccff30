// A round without its forward: what the host and the link take between one round's graph and the next. Wall
// clock of an upload, a graph of the small ops, a read-back and the wait, less the graph's own time on the
// device.
#include <algorithm>
#include <chrono>

#include "backend/staging.h"
#include "core/error.h"
#include "groups.h"

namespace kdt::bench {

void time_round(Bench& bench) {
    const size_t in_bytes = 2560, out_bytes = 768;  // of the executor's round, rounded up
    Staging in, out;
    in.add<char>(in_bytes);
    out.add<char>(out_bytes);
    in.allocate(bench.b, "a benchmark", true);
    out.allocate(bench.b, "a benchmark", true);
    const TreeArrays tree = bench.tree();
    const RowBatch batch = bench.tree_rows();
    const int32_t *nodes = bench.scalar(0), *sequence = bench.scalar(0), *start = bench.scalar(0);
    int32_t* live = bench.ints(1);
    const auto rows = [&] { bench.b.tree_rows({tree, nodes, sequence, start, batch, live}); };
    const auto graph = bench.b.record(rows);
    const double device = bench.time(1, [&](int) { rows(); });
    std::vector<double> times;
    for (int i = 0; i < 400; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        in.upload();
        graph->launch();
        out.download();
        bench.b.synchronize();
        const std::chrono::duration<double, std::micro> wall = std::chrono::steady_clock::now() - begin;
        times.push_back(wall.count());
    }
    std::sort(times.begin(), times.end());
    const double wall = times[times.size() / 2];
    bench.report("round without a forward, wall clock", 1, wall, 0);
    bench.report("host turnaround between rounds", 1, wall - device, 0, 0.0,
                 format("%.2f us on the device", device));
    bench.clear();
}

}  // namespace kdt::bench
