// The stages of a round: build, verify (everything from the forward to the commit, recorded once per size),
// the walk that is read back; and what a verify costs.
#include <algorithm>

#include "core/error.h"
#include "ddtree/build.h"
#include "engine/executor.h"
#include "engine/stopwatch.h"
#include "engine/transfer.h"

namespace kdt {

void Executor::stage_round() {
    in_.start = round_in_.add<int32_t>(1);
    in_.nodes = round_in_.add<int32_t>(1);
    in_.sequence = round_in_.add<int32_t>(1);
    in_.limit = round_in_.add<int32_t>(1);
    in_.stop_count = round_in_.add<int32_t>(1);
    in_.stops = round_in_.add<int32_t>(kMaxStops);
    in_.sample = round_in_.add<SampleParams>(1);
    in_.kept_row = round_in_.add<int32_t>(1);
    in_.count = round_in_.add<int32_t>(1);
    in_.token = round_in_.add<int32_t>(kMaxTreeRows);
    in_.parent = round_in_.add<int32_t>(kMaxTreeRows);
    in_.depth = round_in_.add<int32_t>(kMaxTreeRows);
    in_.source = round_in_.add<int32_t>(kMaxTreeRows);
    in_.weight = round_in_.add<double>(kMaxTreeRows);
    round_in_.allocate(backend_, "round input", true);
    out_.length = round_out_.add<int32_t>(1);
    out_.failed = round_out_.add<int32_t>(1);
    out_.path = round_out_.add<int32_t>(kMaxTreeRows);
    out_.emitted = round_out_.add<int32_t>(kMaxTreeRows);
    round_out_.allocate(backend_, "round output", true);
    round_out_.upload();  // a read-back copies all of it, also what a short walk leaves unwritten
    tree_.count = round_in_.device<int32_t>(in_.count);
    tree_.token = round_in_.device<int32_t>(in_.token);
    tree_.parent = round_in_.device<int32_t>(in_.parent);
    tree_.depth = round_in_.device<int32_t>(in_.depth);
    tree_.source = round_in_.device<int32_t>(in_.source);
    tree_.weight = round_in_.device<double>(in_.weight);
}

const Tree& Executor::build(int32_t root, const Proposal& proposal, int budget, int max_depth) {
    const size_t entries = static_cast<size_t>(proposal.depth) * proposal.width;
    if (proposal.table_token.size() != entries || proposal.table_logp.size() != entries)
        fail(ErrorCode::invalid_argument,
             "a draft table of [%d, %d] holds %zu tokens and %zu log-probabilities", proposal.depth,
             proposal.width, proposal.table_token.size(), proposal.table_logp.size());
    const DraftTable table{proposal.depth, proposal.width, proposal.table_token.data(),
                           proposal.table_logp.data()};
    const size_t paths = proposal.paths.size();
    std::vector<int32_t> length(paths), token(paths * kMaxDepth, -1);
    std::vector<float> logp(token.size(), 0.0f);
    for (size_t p = 0; p < paths; ++p) {
        const Proposal::Path& path = proposal.paths[p];
        length[p] = static_cast<int32_t>(std::min<size_t>({path.token.size(), path.logp.size(), kMaxDepth}));
        std::copy_n(path.token.begin(), length[p], token.begin() + p * kMaxDepth);
        std::copy_n(path.logp.begin(), length[p], logp.begin() + p * kMaxDepth);
    }
    const DraftPaths list{static_cast<int>(paths), kMaxDepth, length.data(), token.data(), logp.data()};
    host_tree_ = build_tree(root, table, list,
                            {std::clamp(budget, 0, kMaxNodes), std::clamp(max_depth, 0, kMaxDepth),
                             engine_->config().vocab_size});

    return host_tree_;
}

bool Executor::verify(const VerifyRequest& request) {
    *round_in_.host<int32_t>(in_.start) = request.start;
    *round_in_.host<int32_t>(in_.nodes) = request.nodes;
    *round_in_.host<int32_t>(in_.sequence) = request.sequence;
    *round_in_.host<int32_t>(in_.limit) = request.limit;
    *round_in_.host<int32_t>(in_.stop_count) = static_cast<int32_t>(request.stops.size());
    round_in_.set(in_.stops, std::vector<int32_t>(request.stops.begin(), request.stops.end()));
    *round_in_.host<SampleParams>(in_.sample) = request.sample;
    *round_in_.host<int32_t>(in_.kept_row) = request.kept_row;
    *round_in_.host<int32_t>(in_.count) = host_tree_.count;
    round_in_.set(in_.token, host_tree_.token);
    round_in_.set(in_.parent, host_tree_.parent);
    round_in_.set(in_.depth, host_tree_.depth);
    round_in_.set(in_.source, host_tree_.source);
    round_in_.set(in_.weight, host_tree_.weight);
    return launch_round(request.nodes, request.kept_row >= 0, request.cancel);
}

bool Executor::launch_round(int nodes, bool taps, const std::atomic<bool>* cancel) {
    Stopwatch watch;
    stage_seconds_ = {};
    // What is recorded runs to its end: a device looks here, a backend that computes at once in every layer.
    if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) return false;
    round_in_.upload();

    cancel_ = cancel;
    was_cancelled_ = false;
    Graph* const graph = round_graph(nodes + 1, taps);
    if (graph == nullptr) return false;
    graph->launch();
    stage_seconds_.verify += watch.lap() - stage_seconds_.accept - stage_seconds_.commit;
    return !was_cancelled_;
}

// One recording per size of the cost table: rows in between ride as padding, which changes no bit and loads
// no weights.
Graph* Executor::round_graph(int rows, bool taps) {
    const size_t i = CostTable::index(rows - 1);
    std::unique_ptr<Graph>& graph = round_graphs_[taps][i];
    recorded_ = !graph && backend_.queues();
    if (!graph) {
        graph = backend_.record(
            [this, capacity = CostTable::kSizes[i] + 1, taps] { queue_round(capacity, taps); });
        if (was_cancelled_) graph.reset();  // in the middle of the recording
    }
    return graph.get();
}

void Executor::queue_round(int capacity, bool taps) {
    const int32_t* start = round_in_.device<int32_t>(in_.start);
    const int32_t* sequence = round_in_.device<int32_t>(in_.sequence);
    backend_.tree_rows(
        {tree_, round_in_.device<int32_t>(in_.nodes), sequence, start, batch_, live_.as<int32_t>()});

    ForwardArgs args = forward_args(capacity);
    args.want_logits = {args.rows, nullptr};
    if (taps) want_taps(args);
    if (!run(args)) {
        was_cancelled_ = true;
        return;
    }
    backend_.select({args.rows, logits_.as<float>(), engine_->config().vocab_size, batch_.position,
                     round_in_.device<SampleParams>(in_.sample), selected_.as<int32_t>()});

    Stopwatch watch;
    AcceptArgs accept{};
    accept.tree = tree_;
    accept.live = live_.as<int32_t>();
    accept.selected = selected_.as<int32_t>();
    accept.limit = round_in_.device<int32_t>(in_.limit);
    accept.stop_count = round_in_.device<int32_t>(in_.stop_count);
    accept.stops = round_in_.device<int32_t>(in_.stops);
    accept.length = round_out_.device<int32_t>(out_.length);
    accept.failed = round_out_.device<int32_t>(out_.failed);
    accept.path = round_out_.device<int32_t>(out_.path);
    accept.emitted = round_out_.device<int32_t>(out_.emitted);
    backend_.accept(accept);
    stage_seconds_.accept = watch.lap();

    backend_.commit({accept.length, accept.path, start, sequence, engine_->config().cache_width(),
                     caches_.front(), static_cast<int>(caches_.size()), pages_.bytes() / caches_.size(),
                     scratch_kv_.bytes() / caches_.size()});
    if (taps)
        backend_.keep_taps({accept.length, accept.path, round_in_.device<int32_t>(in_.kept_row),
                            draft_runner_->kept_capacity(), draft_runner_->config().tap_width(),
                            draft_runner_->taps(), draft_runner_->kept()});
    stage_seconds_.commit = watch.lap();
}

Executor::Walk Executor::walk() {
    Stopwatch watch;
    round_out_.download();
    stage_seconds_.verify += watch.lap();
    const int length = *round_out_.host<int32_t>(out_.length);
    const int32_t* path = round_out_.host<int32_t>(out_.path);
    const int32_t* emitted = round_out_.host<int32_t>(out_.emitted);
    Walk walk;
    walk.seconds = stage_seconds_;
    walk.recorded = recorded_;
    walk.failed = *round_out_.host<int32_t>(out_.failed) != 0;
    walk.path.assign(path, path + length);
    walk.emitted.assign(emitted, emitted + length);
    const std::vector<int32_t>& parent = host_tree_.parent;
    for (int j = 1; j < length; ++j) {
        const auto first = std::find(parent.begin(), parent.end(), walk.path[j - 1]);
        if (first - parent.begin() != walk.path[j]) walk.branched = true;
    }
    return walk;
}

int32_t Executor::select_last(const SampleParams& sample, int rows) {
    *round_in_.host<SampleParams>(in_.sample) = sample;
    round_in_.upload();
    backend_.select({{1, logit_live_.as<int32_t>()},
                     logits_.as<float>(),
                     engine_->config().vocab_size,
                     batch_.position + rows - 1,
                     round_in_.device<SampleParams>(in_.sample),
                     selected_.as<int32_t>()});
    return get(backend_, selected_.as<int32_t>(), 1)[0];
}

void Executor::measure_costs(int sequence, int start, std::span<const int32_t> text, bool taps) {
    // Distinct tokens, the text's own as far as they go: rows that are equal would share all of their
    // experts.
    const int vocab = engine_->config().vocab_size;
    std::vector<int32_t> tokens(text.rbegin(), text.rend());
    for (int i = 0; i < kMaxTreeRows; ++i) tokens.push_back(static_cast<int32_t>((1 + 7919ll * i) % vocab));
    std::vector<int32_t> distinct;
    for (const int32_t token : tokens) {
        if (distinct.size() == static_cast<size_t>(kMaxTreeRows)) break;
        if (std::find(distinct.begin(), distinct.end(), token) == distinct.end()) distinct.push_back(token);
    }
    while (distinct.size() < static_cast<size_t>(kMaxTreeRows)) distinct.push_back(distinct.front());

    host_tree_ = Tree{};
    host_tree_.count = kMaxNodes;
    host_tree_.token = distinct;
    host_tree_.parent.assign(kMaxTreeRows, 0);
    host_tree_.depth.assign(kMaxTreeRows, 1);
    host_tree_.source.assign(kMaxTreeRows, kFromTable);
    host_tree_.weight.assign(kMaxTreeRows, -1.0);
    host_tree_.parent[0] = -1;
    host_tree_.depth[0] = host_tree_.source[0] = 0;
    host_tree_.weight[0] = 0.0;
    VerifyRequest request;
    request.sequence = sequence;
    request.start = start;
    request.limit = 0;
    if (taps) request.kept_row = sequence * DFlashRunner::kKeptRows;
    const auto once = [&](int nodes) {
        Stopwatch watch;
        request.nodes = nodes;
        verify(request);
        walk();
        return watch.lap();
    };
    // A first run records the graph, and a device's first launch of it loads it.
    engine_->costs().measure(once, CostTable::kLimitSeconds, [&](int nodes) {
        const bool ready = !backend_.queues() || round_graphs_[taps][CostTable::index(nodes)] != nullptr;
        return ready ? 0.0 : once(nodes);
    });
}

}  // namespace kdt
