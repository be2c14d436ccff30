"""Memory and reads per GPU against published tables; what cannot be split."""

from __future__ import annotations

import pytest

from harness.scale import inventory, layout
from harness.scale.hardware import SYSTEMS
from harness.scale.layout import Layout, data_parallel_attention, expert_parallel, tensor_parallel
from harness.scale.routing import INDEPENDENT
from harness.scale.shapes import GLM_47_FLASH, K26, MOONLIGHT, SHAPES, V2_LITE, Shape
from harness.scale.values import ScaleError

GIB = 2**30


@pytest.mark.parametrize(
    ("where", "gigabytes", "gibibytes", "left_pro", "left_131"),
    [
        (tensor_parallel(8), 76.2, 71.0, 21.6, 57.0),
        (expert_parallel(8), 76.2, 71.0, 21.6, 57.0),
        # published as 39: 131 - 3 - 88.28 is 39.7
        (data_parallel_attention(8), 94.8, 88.3, 4.3, 39.7),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_published_memory_of_k2(
    where: Layout, gigabytes: float, gibibytes: float, left_pro: float, left_131: float
) -> None:
    """Catches a component replicated that is split, or the reverse. The published table takes 131 GiB for an H200; its
    driver reports 140.4, which the documents use."""
    held = layout.weight_bytes(K26, where)
    assert held / 1e9 == pytest.approx(gigabytes, abs=0.05)
    assert held / GIB == pytest.approx(gibibytes, abs=0.05)
    pro = float(SYSTEMS["pro6000x8"].gpu.memory)
    assert pro / GIB == pytest.approx(95.6, abs=0.05)
    assert layout.memory_left(K26, where, pro) / GIB == pytest.approx(left_pro, abs=0.05)
    assert layout.memory_left(K26, where, 131 * GIB) / GIB == pytest.approx(left_131, abs=0.1)
    assert layout.memory_left(K26, where, float(SYSTEMS["h200x8"].gpu.memory)) / GIB == pytest.approx(
        left_131 + 9.4, abs=0.1
    )


def test_cache_room_beside_k2() -> None:
    """Catches gibibytes taken for gigabytes: 21.6 GiB hold about 330 thousand tokens in bf16, 660 in fp8, and eight
    times as many when cut over the ranks."""
    left = layout.memory_left(K26, tensor_parallel(8), float(SYSTEMS["pro6000x8"].gpu.memory))
    assert left / inventory.cache_bytes(K26) == pytest.approx(330e3, rel=0.01)
    assert left / inventory.cache_bytes(K26, "fp8") == pytest.approx(660e3, rel=0.01)
    gpu = SYSTEMS["pro6000x8"].gpu
    assert layout.fits(K26, tensor_parallel(8), gpu, 330_000)
    assert not layout.fits(K26, tensor_parallel(8), gpu, 332_000)
    assert layout.fits(K26, tensor_parallel(8, cache_shards=8), gpu, 8 * 330_000)


def test_replicated_part_of_k2() -> None:
    """Catches a change of what counts as small: q_a, kv_a and router are 2.18 GB."""
    assert inventory.step_bytes(K26, "small") / 1e9 == pytest.approx(2.18, abs=0.005)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_nothing_is_lost_between_ranks(shape: Shape, gpus: int) -> None:
    """Catches a component that no rank holds or reads: with everything split, the ranks' shares add up to the whole;
    only norms and the router's bias are there more than once."""
    where = tensor_parallel(gpus, "sharded")
    copied = sum(part.bytes for part in inventory.components(shape) if part.split == "norm")
    whole = inventory.total_bytes(shape) + (gpus - 1) * copied
    assert gpus * layout.weight_bytes(shape, where) == pytest.approx(whole, rel=1e-12)
    read = layout.step_read(shape, where, 4, INDEPENDENT)
    experts = INDEPENDENT.distinct(shape.experts, shape.top_k, 4) * shape.moe_layers * inventory.expert_bytes(shape)
    assert gpus * read.rest == pytest.approx(inventory.non_expert_bytes(shape), rel=1e-12)
    assert gpus * read.experts == pytest.approx(experts, rel=1e-9)


def test_uneven_experts_count_for_the_fullest_rank() -> None:
    """Catches an average where ranks differ: 384 experts over 72 ranks are 6 on some."""
    where = data_parallel_attention(72)
    per_expert = inventory.expert_bytes(K26) * 60
    rest = layout.weight_bytes(K26, where) - 6 * per_expert
    assert rest == pytest.approx(layout.weight_bytes(K26, data_parallel_attention(64)) - 6 * per_expert, rel=1e-4)


@pytest.mark.parametrize("shape", [MOONLIGHT, V2_LITE], ids=lambda shape: shape.name)
def test_1408_columns_are_5_and_a_half_groups_over_8(shape: Shape) -> None:
    """Catches a split of INT4 groups of 32 in the middle, which would need scales of half groups."""
    assert not layout.problems(shape, tensor_parallel(4))
    (problem,) = layout.problems(shape, tensor_parallel(8))
    assert problem == "moe_intermediate_size 1408 over 8 ranks is 176 columns = 5.5 groups of 32"
    assert not layout.problems(shape.with_experts("bf16"), tensor_parallel(8))
    assert not layout.problems(shape, expert_parallel(8))
    assert layout.widest_expert_tp(shape) == 4
    with pytest.raises(ScaleError, match=r"5\.5 groups"):
        layout.weight_bytes(shape, tensor_parallel(8))


def test_limits_of_other_models() -> None:
    """Catches limits that are forgotten: heads, columns, more ranks than experts."""
    assert layout.widest_expert_tp(K26) == 64
    assert not layout.problems(K26, tensor_parallel(64))
    assert {p.split(" over ")[0] for p in layout.problems(K26, tensor_parallel(128))} == {
        "64 heads do not split",
        "moe_intermediate_size 2048",
    }
    assert layout.problems(GLM_47_FLASH, tensor_parallel(8)) == ["20 heads do not split over 8 ranks"]
    assert layout.problems(K26, data_parallel_attention(385)) == ["384 experts cannot be dealt to 385 ranks"]


@pytest.mark.parametrize(
    "numbers", [(0, 8, 1), (8, 0, 1), (8, 8, 0), (3, 8, 1), (16, 8, 1), (8, 8, 1, "replicated", 3)]
)
def test_impossible_layouts(numbers: tuple[int, int, int]) -> None:
    """Catches a layout whose parts do not add up to its GPUs."""
    with pytest.raises(ScaleError):
        Layout("impossible", *numbers)
