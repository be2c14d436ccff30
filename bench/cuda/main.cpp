// kdtree-bench-cuda: times the CUDA backend's ops at the shapes of Kimi K2 and Moonlight.
//
// Every figure is the median over replays of a CUDA graph that runs the op once for each of several weight
// (or cache) sets, together far larger than the L2, so that no replay finds its bytes there; microseconds per
// op. `floor` is the op's bytes at 4.3 TB/s, a read rate measured on an H200. Writes one JSON object.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "core/arguments.h"
#include "groups.h"

namespace {

using namespace kdt;
using namespace kdt::bench;

const std::vector<int> kAllRows = {1, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 256}, kFewRows = {1, 8, 16, 64};
constexpr auto kW4 = WeightKind::w4a16, kBf16 = WeightKind::bf16;

struct Group {
    const char* name;
    void (*run)(Bench&);
};
const Group kGroups[] = {
    {"linear",
     [](Bench& b) {
         time_linear(b, "", kW4, 4096, 7168, kAllRows);
         time_linear(b, "", kW4, 7168, 2048, kFewRows);
         time_linear(b, "", kW4, 36864, 7168, kAllRows);
         time_linear(b, "", kW4, 7168, 18432, kAllRows);
         time_linear(b, "", kW4, 2816, 2048, kFewRows);
         time_linear(b, "", kW4, 2048, 1408, kFewRows);
     }},
    {"dense",
     [](Bench& b) {
         time_linear(b, "q_a", kBf16, 1536, 7168, kFewRows);
         time_linear(b, "q_b", kBf16, 12288, 1536, kFewRows);
         time_linear(b, "kv_a", kBf16, 576, 7168, kFewRows);
         time_linear(b, "o", kBf16, 7168, 8192, kFewRows);
         time_linear(b, "head", kBf16, 163840, 7168, {1, 16, 64});
         time_linear(b, "Moonlight q", kBf16, 3072, 2048, kFewRows);
         time_linear(b, "Moonlight kv_a", kBf16, 576, 2048, kFewRows);
         time_linear(b, "Moonlight o", kBf16, 2048, 2048, kFewRows);
     }},
    {"gated",
     [](Bench& b) {
         time_gated(b, kBf16, 2048, 7168, kFewRows);
         time_gated(b, kBf16, 2816, 2048, kFewRows);
         time_gated(b, kW4, 2048, 7168, kFewRows);
     }},
    {"heads",
     [](Bench& b) {
         time_heads(b, 64, kFewRows);
         time_heads(b, 16, {1, 16});
     }},
    {"moonlight",
     [](Bench& b) { time_experts(b, "Moonlight, 64 top 6", 64, 6, 2048, 1408, {1, 8, 16, 32, 64, 128}); }},
    {"experts",
     [](Bench& b) { time_experts(b, "K2, 384 top 8", 384, 8, 7168, 2048, {1, 4, 8, 16, 32, 64, 128}); }},
    {"attend",
     [](Bench& b) {
         time_attention(b, 64, {1024, 4096, 16384, 65536, 131072}, {1, 8, 16, 32, 64});
         time_attention(b, 16, {1024, 4096}, {1, 8, 16, 64});
     }},
    {"small", [](Bench& b) { time_small_ops(b, 7168, 384, 8, 163840, kFewRows); }},
    {"tree", time_tree},
    {"round", time_round},
};

struct Options {
    std::vector<std::string> only;  // groups; empty: all
    std::string out;
    int replays = 25;

    bool wants(const std::string& group) const {
        return only.empty() || std::find(only.begin(), only.end(), group) != only.end();
    }
};

constexpr const char* kUsage =
    "usage: kdtree-bench-cuda [--only GROUP,...] [--out FILE] [--replays N]\n"
    "GROUP: linear, dense, gated, heads, experts, moonlight, attend, small, tree, round; all where none is "
    "given.\n";

// False where only the usage is asked for.
bool parse(Arguments words, Options& o) {
    std::vector<const char*> groups;
    for (const Group& group : kGroups) groups.push_back(group.name);
    while (words.next()) {
        if (words.is("--help") || words.is("-h")) return false;
        if (words.is("--only"))
            o.only = words.choices(groups);
        else if (words.is("--out"))
            o.out = words.text();
        else if (words.is("--replays"))
            o.replays = words.integer(1, 100000);
        else
            words.unknown();
    }
    return true;
}

int run(const Options& o) {
    Bench bench(o.replays);
    std::printf("%s\n", bench.b.description().c_str());
    for (const Group& group : kGroups)
        if (o.wants(group.name)) group.run(bench);
    if (!o.out.empty()) bench.write_record(o.out);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    return run_tool(
        "kdtree-bench-cuda", kUsage, [&] { return parse({argc, argv}, options); },
        [&] { return run(options); });
}
