"""Step times against published arithmetic, cost models against published timings, and properties of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.scale import comm, hardware, inventory, model
from harness.scale.hardware import SYSTEMS, System
from harness.scale.layout import Layout, data_parallel_attention, expert_parallel, tensor_parallel
from harness.scale.model import ROOFLINE, TARGET, Work
from harness.scale.routing import INDEPENDENT, ExcessRouting
from harness.scale.shapes import K26, MOONLIGHT
from harness.scale.values import ScaleError, Sourced

MS = 1e3
REPLICATED, SHARDED = tensor_parallel(8), tensor_parallel(8, "sharded")
EIGHT_BIT = replace(ROOFLINE, eight_bit=True)


def with_bandwidth(name: str, speed: float) -> System:
    """The published arithmetic rounds RTX PRO 6000's 1.792 TB/s to 1.79."""
    system = SYSTEMS[name]
    return replace(system, gpu=replace(system.gpu, bandwidth=Sourced(speed, "B/s", "published", "rounded")))


PRO, H200 = with_bandwidth("pro6000x8", 1.79e12), SYSTEMS["h200x8"]

# rows; RTX PRO 6000 x8: ms replicated, sharded, both with 8-bit non-expert weights; H200 x8: both; break-even: bf16,
# 8-bit
PUBLISHED_STEPS = [
    (1, 3.37, 2.30, 2.19, 1.58, 1.26, 0.86, 1.0, 1.0),
    (2, 4.18, 3.12, 3.00, 2.39, 1.56, 1.16, 1.35, 1.52),
    (4, 5.76, 4.69, 4.58, 3.97, 2.15, 1.75, 2.04, 2.51),
    (8, 8.72, 7.65, 7.54, 6.93, 3.25, 2.85, 3.32, 4.39),
    (16, 13.9, 12.9, 12.8, 12.2, 5.20, 4.80, 5.59, 7.70),
    (32, 22.1, 21.0, 20.9, 20.3, 8.23, 7.84, 9.12, 12.9),
    (64, 32.0, 31.0, 30.9, 30.3, 12.0, 11.6, 13.5, 19.2),
]


@pytest.mark.parametrize("row", PUBLISHED_STEPS, ids=lambda row: f"N={row[0]}")
def test_published_ideal_steps(row: tuple[float, ...]) -> None:
    """Catches an error in what a GPU reads, to the digits of the published table (which rounded some twice)."""
    rows, *expected = row
    work = Work(rows=int(rows))
    found = [
        model.step(PRO, K26, REPLICATED, work, ROOFLINE).total * MS,
        model.step(PRO, K26, SHARDED, work, ROOFLINE).total * MS,
        model.step(PRO, K26, REPLICATED, work, EIGHT_BIT).total * MS,
        model.step(PRO, K26, SHARDED, work, EIGHT_BIT).total * MS,
        model.step(H200, K26, REPLICATED, work, ROOFLINE).total * MS,
        model.step(H200, K26, SHARDED, work, ROOFLINE).total * MS,
        model.speculative_round(PRO, K26, SHARDED, work, ROOFLINE, drafted=False).break_even,
        model.speculative_round(PRO, K26, SHARDED, work, EIGHT_BIT, drafted=False).break_even,
    ]
    for value, published in zip(found, expected, strict=True):
        assert value == pytest.approx(published, abs=0.055 if published >= 10 else 0.0051), row


def test_published_readings_of_the_steps() -> None:
    """Catches a drift of what the documents conclude: replication costs 46 % at one row; EP over 8 ranks is bound by
    the busiest one (published 3.53 ms from a simulated 2.48 experts; 2.57 exactly makes it 3.61) and catches up at 64
    (published 34.4)."""
    one, wide = Work(), Work(rows=64)
    whole, split = (model.step(PRO, K26, each, one, ROOFLINE).total for each in (REPLICATED, SHARDED))
    assert whole / split - 1 == pytest.approx(0.463, abs=0.001)  # 6.03 to 4.12 GB: 46 %, published as 47
    dealt = expert_parallel(8, "sharded")
    assert model.step(PRO, K26, dealt, one, ROOFLINE).total * MS == pytest.approx(3.61, abs=0.005)
    assert model.step(PRO, K26, dealt, wide, ROOFLINE).total * MS == pytest.approx(34.45, abs=0.01)


@pytest.mark.parametrize(
    ("context", "system", "expected"),
    [(32768, PRO, 1.29), (131072, PRO, 5.1), (32768, H200, 0.48), (131072, H200, 1.9)],
)
def test_published_cache_reads(context: int, system: System, expected: float) -> None:
    """Catches the cache being split over ranks that all read it whole."""
    time = model.step(system, K26, SHARDED, Work(context=context), ROOFLINE).attention * MS
    assert time == pytest.approx(expected, abs=0.05 if expected > 1.5 else 0.006)
    cut = tensor_parallel(8, "sharded", cache_shards=8)
    assert model.step(system, K26, cut, Work(context=context), ROOFLINE).attention * MS == pytest.approx(time / 8)


@pytest.mark.parametrize(
    ("fixed", "speed", "expected"),
    [
        (8.2, 1.5e12, {4: (1.26, 1.18), 8: (1.58, 1.41), 16: (2.15, 1.81), 32: (3.04, 2.43), 64: (4.12, 3.19)}),
        (4.0, 1.5e12, {4: (1.42, 1.30), 8: (1.95, 1.66), 16: (2.87, 2.31), 32: (4.31, 3.32), 64: (6.07, 4.55)}),
        (2.0, 1.5e12, {4: (1.60, 1.42), 8: (2.34, 1.94), 16: (3.66, 2.86), 32: (5.70, 4.29), 64: (8.20, 6.04)}),
        (8.2, 4.3e12, {4: (1.11, 1.08), 8: (1.24, 1.17), 16: (1.48, 1.34), 32: (1.85, 1.60), 64: (2.30, 1.91)}),
        (2.0, 4.3e12, {4: (1.34, 1.24), 8: (1.75, 1.53), 16: (2.49, 2.04), 32: (3.63, 2.84), 64: (5.03, 3.82)}),
    ],
)
def test_published_break_even_with_a_fixed_cost(
    fixed: float, speed: float, expected: dict[int, tuple[float, float]]
) -> None:
    """Catches the excess of overlapping experts taken wrongly: break-even of fixed ms + bytes / speed, independent and
    with 0.7 of the excess. The published column rounds bytes to three digits."""
    for rows, published in expected.items():
        for routing, value in zip((INDEPENDENT, ExcessRouting(0.7)), published, strict=True):
            experts = routing.distinct(384, 8, rows) * 60 * inventory.expert_bytes(K26)
            wide = (experts + inventory.non_expert_bytes(K26)) / 8 / speed * MS + fixed
            narrow = (8 * 60 * inventory.expert_bytes(K26) + inventory.non_expert_bytes(K26)) / 8 / speed * MS + fixed
            assert wide / narrow == pytest.approx(value, abs=0.016)


def test_bytes_of_measured_shapes() -> None:
    """Catches a disagreement with the measurements on one H200: bytes of a step of Moonlight and of 7 layers of K2.6's
    dimensions, and the floor of the expert kernels at 4.3 TB/s."""

    def one_row(shape):  # type: ignore[no-untyped-def]
        experts = shape.moe_layers * shape.top_k * inventory.expert_bytes(shape)
        return (experts + inventory.non_expert_bytes(shape)) / 1e9

    assert one_row(replace(K26, layers=7)) == pytest.approx(6.3, abs=0.05)
    assert one_row(replace(K26, layers=3)) == pytest.approx(4.3, abs=0.05)
    assert one_row(MOONLIGHT) == pytest.approx(3.2, abs=0.05)
    floors = {1: 46, 4: 176, 8: 344, 16: 637, 32: 1090, 64: 1621, 128: 2069, 256: 2201}
    for rows, us in floors.items():
        modelled = INDEPENDENT.distinct(384, 8, rows) * inventory.expert_bytes(K26) / 4.3e12 * 1e6
        assert modelled == pytest.approx(us, rel=0.02)


# ------------------------------------------------------------------------------------------------------------
# collectives


@pytest.mark.parametrize("timing", comm.PUBLISHED, ids=lambda t: f"{t.fabric.name}-{t.algorithm}-{t.ranks}-{t.size}")
def test_cost_models_meet_the_published_timings(timing: comm.Timing) -> None:
    """Catches a fit that no longer fits its points, which is all that there is to check it against."""
    algorithm = timing.fabric.algorithm(timing.algorithm)
    assert algorithm is not None
    modelled = algorithm.seconds(timing.size, timing.ranks) * 1e6
    assert modelled == pytest.approx(timing.us, rel=timing.tolerance)


def test_crossovers_on_pcie() -> None:
    """Catches a model that is right at its points and wrong between: one-shot wins at one row and loses to NCCL
    between 32 and 64 KiB at 8 GPUs (published)."""
    one_shot, ring = comm.PCIE5.algorithm("one-shot"), comm.PCIE5.algorithm("ring")
    assert one_shot is not None and ring is not None
    assert one_shot.seconds(32 * 1024, 8) < ring.seconds(32 * 1024, 8)
    assert one_shot.seconds(64 * 1024, 8) > ring.seconds(64 * 1024, 8)
    assert comm.PCIE5.all_reduce(14336, 8)[1] is one_shot


@pytest.mark.parametrize(
    ("ranks", "dispatch", "combine"),
    [(8, 77, 114), (16, 118, 195), (32, 155, 273), (64, 173, 314), (128, 192, 369), (256, 194, 360)],
)
def test_published_all_to_all(ranks: int, dispatch: float, combine: float) -> None:
    """Catches wrong bytes of a dispatched row: DeepEP's latencies for 128 tokens a rank, 7168 wide, top 8, follow from
    its rates (published rounded) to 5 %."""
    dispatched, combined = 128 * 8 * (7168 + 7168 / 128 * 4), 128 * 8 * 7168 * 2
    assert comm.CX7.all_to_all(dispatched, ranks, combine=False) * 1e6 == pytest.approx(dispatch, rel=0.05)
    assert comm.CX7.all_to_all(combined, ranks, combine=True) * 1e6 == pytest.approx(combine, rel=0.05)
    assert comm.CX7.all_to_all(8.0, ranks, combine=False) == comm.CX7.fixed


def test_122_all_reduces_of_14_336_bytes() -> None:
    """Catches a layer counted once or a message of the wrong width: at 10 us each they are 1.2 ms (published)."""
    flat = comm.Fabric("flat", (comm.AllReduce("one-shot", 10e-6, 1e30, "modelled", ""),))
    system = replace(SYSTEMS["pro6000x8"], fabric=flat)
    assert model.step(system, K26, SHARDED, Work()).communication == pytest.approx(122 * 10e-6, rel=1e-9)
    slow = comm.Fabric("slow", (comm.AllReduce("two-shot", 0.0, 1.0, "modelled", ""),))
    system = replace(system, fabric=slow)
    assert model.step(system, K26, SHARDED, Work()).communication == pytest.approx(122 * 2 * 7 / 8 * 14336)


def flat(system: System, fixed: float, rate: float) -> System:
    """The same system with a fabric whose three operations cost `fixed` (two-shot: twice) and bytes / rate."""
    one_shot = comm.AllReduce("one-shot", fixed, rate, "modelled", "")
    two_shot = replace(one_shot, algorithm="two-shot", fixed=2 * fixed)
    return replace(system, fabric=comm.Fabric("flat", (one_shot, two_shot)))


def test_all_reduce_between_nodes() -> None:
    """Catches a slice of the wrong size between nodes: 16 GPUs reduce-scatter 8 ways, exchange an eighth with the one
    other node, and gather again."""
    system, size = flat(SYSTEMS["b200-ib"], 1e-6, 1e9), 8e6
    inside = 2e-6 + 2 * 7 / 8 * size / 1e9
    assert model.all_reduce(system, size, 16) == pytest.approx(inside + comm.CX7.fixed + size / 8 / comm.CX7.rate)
    assert model.all_reduce(system, size, 64) == pytest.approx(inside + comm.CX7.fixed + 7 * size / 8 / comm.CX7.rate)
    assert model.all_reduce(system, size, 8) == system.fabric.all_reduce(size, 8)[0]


def test_all_to_all_replaces_one_all_reduce_a_layer() -> None:
    """Catches a layer's experts charged twice. Two groups of 4 ranks: attention, shared experts and the dense layer
    all-reduce inside a group, the routed experts' rows go out and come back, each rank for a quarter of its group's."""
    system = flat(SYSTEMS["h200x8"], 1e-6, 1e12)
    hybrid = Layout("hybrid", attention_tp=4, expert_tp=1, expert_ep=8)
    time = model.step(system, K26, hybrid, Work(sequences=6)).communication
    reduce = system.fabric.all_reduce(3 * 7168 * 2, 4)[0]  # three of the six sequences in a group
    received = 3 * 8 / 4
    out, back = received * (7168 + 56 * 4), received * 7168 * 2
    assert time == pytest.approx((61 + 1) * reduce + 60 * (2e-6 + (out + back) / 1e12), rel=1e-9)


def test_uneven_sequences_wait_for_the_fullest_group() -> None:
    """Catches an average over groups: 9 sequences on 8 ranks take as long as 16 in attention and communication."""
    where = data_parallel_attention(8)
    nine, sixteen = (model.step(H200, K26, where, Work(n, 1, 8192)) for n in (9, 16))
    assert nine.attention == sixteen.attention > model.step(H200, K26, where, Work(8, 1, 8192)).attention
    assert nine.communication == sixteen.communication


def test_cut_cache_costs_two_exchanges_a_layer() -> None:
    """Catches a cache cut over ranks for nothing: queries of all heads go out (576 wide), outputs (512) come back."""
    system = flat(SYSTEMS["h200x8"], 1e-6, 1e12)
    whole = model.step(system, K26, SHARDED, Work(rows=3, context=4096)).communication
    cut = model.step(system, K26, tensor_parallel(8, "sharded", 8), Work(rows=3, context=4096)).communication
    moved = 3 * 64 * (576 + 512) * 2 * 7 / 8
    assert cut - whole == pytest.approx(61 * (2e-6 + moved / 1e12), rel=1e-9)


def test_fixed_costs_of_a_step_and_of_a_draft() -> None:
    """Catches a fixed cost that is lost or paid twice: 12 us a layer; six layers and twelve all-reduces of a draft."""
    system = flat(SYSTEMS["h200x8"], 1e-6, 1e30)
    assert model.step(system, K26, SHARDED, Work()).overhead == pytest.approx(61 * 12e-6)
    bare = replace(TARGET, communication=False, overhead=False)
    draft, bytes_alone = (model.draft_seconds(system, K26, SHARDED, 8, each) for each in (TARGET, bare))
    assert draft - bytes_alone == pytest.approx(6 * 12e-6 + 12 * 1e-6)


def test_the_busiest_rank_also_computes_most() -> None:
    """Catches an even share of operations where experts are dealt unevenly: one row, a machine without matrix units."""
    slow = replace(H200, gpu=replace(H200.gpu, bf16=Sourced(1.0, "flop/s", "modelled", "")))
    routed = 2 * 60 * 8 * 3 * 7168 * 2048
    rest = inventory.flops_per_row(K26) - routed
    seconds = model.step(slow, K26, expert_parallel(8, "sharded"), Work(), ROOFLINE).weights
    assert seconds == pytest.approx(rest / 8 + routed * INDEPENDENT.busiest(384, 8, 1, 8) / 8, rel=1e-9)


def test_one_gpu_talks_to_nobody() -> None:
    """Catches a fixed cost charged where there is no call."""
    single = tensor_parallel(1)
    assert model.step(SYSTEMS["h200x8"], MOONLIGHT, single, Work(rows=8, context=4096)).communication == 0.0


# ------------------------------------------------------------------------------------------------------------
# properties


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("assumed", [ROOFLINE, TARGET], ids=["roofline", "target"])
def test_more_work_never_takes_less_time(name: str, assumed: model.Assumptions) -> None:
    """Catches a term with the wrong sign or a minimum where a maximum belongs."""
    for where in (SHARDED, REPLICATED, expert_parallel(8), data_parallel_attention(8)):
        times = [model.step(SYSTEMS[name], K26, where, Work(8, n, 4096), assumed).total for n in (1, 2, 3, 8, 17, 65)]
        assert times == sorted(times)
        times = [model.step(SYSTEMS[name], K26, where, Work(8, 4, c), assumed).total for c in (0, 1, 4096, 262144)]
        assert times == sorted(times) and times[-1] > times[0]


@pytest.mark.parametrize("name", SYSTEMS)
def test_target_is_never_below_the_roofline(name: str) -> None:
    """Catches an achieved bandwidth above the nominal one."""
    for n in (1, 8, 64):
        work = Work(rows=n, context=32768)
        roof = model.step(SYSTEMS[name], K26, SHARDED, work, ROOFLINE)
        target = model.step(SYSTEMS[name], K26, SHARDED, work, TARGET)
        assert target.weights >= roof.weights and target.attention >= roof.attention
        assert target.total > roof.total


def test_compute_bounds_many_rows() -> None:
    """Catches a missing matrix rate: 8,192 rows read every expert once, and no machine multiplies them that fast."""
    system = SYSTEMS["h200x8"]
    reads = model.step(system, K26, SHARDED, Work(), ROOFLINE)
    many = model.step(system, K26, SHARDED, Work(sequences=8192), ROOFLINE)
    flops = 8192 * inventory.flops_per_row(K26) / 8 / float(system.gpu.bf16)
    assert many.weights == pytest.approx(flops, rel=0.01) and many.weights > 10 * reads.weights


def test_long_contexts_bound_by_compute() -> None:
    """Catches an error in absorbed attention's operations: 64 rows at 65,536 positions take FlashMLA 965 us a layer on
    one H200 (measured), at its peak of about 620 TFLOP/s."""
    a_layer = 64 * 65536 * inventory.attention_flops_per_key(K26) / K26.layers
    assert a_layer / 965e-6 == pytest.approx(605e12, rel=0.01)


def test_rounds_and_break_even() -> None:
    """Catches a draft pass that is forgotten, or counted for plain decoding: DFlash's pass is about 0.65 ms on eight
    RTX PRO 6000 at nominal bandwidth (published), and a round that emits its break-even gains nothing."""
    assert model.draft_seconds(PRO, K26, SHARDED, 8, ROOFLINE) * MS == pytest.approx(0.65, abs=0.005)
    each = model.speculative_round(PRO, K26, SHARDED, Work(rows=8, context=4096))
    assert each.speedup(each.break_even) == pytest.approx(1.0)
    assert each.tokens_per_second(each.break_even) == pytest.approx(1 / each.plain)
    free = model.speculative_round(PRO, K26, SHARDED, Work(rows=8, context=4096), drafted=False)
    assert each.break_even - free.break_even == pytest.approx(each.draft / each.plain)
    assert model.speculative_round(PRO, K26, SHARDED, Work()).break_even == 1.0


@pytest.mark.parametrize(
    ("name", "gpus"), [("pro6000x8", 16), ("h200x8", 64), ("b200-ib", 128), ("b200-ib", 12), ("gb300-nvl72", 128)]
)
def test_layouts_beyond_the_system(name: str, gpus: int) -> None:
    """Catches GPUs that do not exist, and a number of them that is no whole number of nodes."""
    with pytest.raises(ScaleError):
        model.step(SYSTEMS[name], K26, data_parallel_attention(gpus), Work())


def test_every_input_says_where_it_comes_from() -> None:
    """Catches a number without a source."""
    for system in SYSTEMS.values():
        gpu = system.gpu
        for value in (gpu.memory, gpu.bandwidth, gpu.achieved, gpu.bf16, gpu.power, gpu.hour):
            assert value.source.strip() and value.kind in ("measured", "published", "modelled")
            assert float(value) > 0
        assert all(each.source.strip() for each in system.fabric.algorithms)
    assert all(peer.source.strip() for peer in hardware.PEERS)
    assert all(each.source.strip() for each in hardware.ACCEPTANCES)


@pytest.mark.parametrize("numbers", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_impossible_work(numbers: tuple[int, int, int]) -> None:
    """Catches a step of nothing."""
    with pytest.raises(ScaleError):
        Work(*numbers)
