"""Where each reported failure of other engines has its test: rows of a list of such reports, by number.

A row is in test_reported_failures.py, or here, or in ELSEWHERE with the test that holds it, or in NOT_HERE with the
reason. The reports themselves are named in the docstrings.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from folders import CONFIG, write_folder

from kdtree_engine import Engine

ROOT = Path(__file__).parents[2]
PROMPT = list(range(3, 70))  # a page of the cache and a bit
HERE = (Path(__file__), Path(__file__).with_name("test_reported_failures.py"))
ROWS = {
    1, 2, 3, 4, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 34, 36, 37, 38,
    39, 41, 42, 43, 45, 46, 48, 49, 51, 52, 54, 56, 57,
}  # fmt: skip
ELSEWHERE: dict[int, tuple[str, str]] = {
    # vllm#40357, sglang#23264: repeated words on one GPU architecture, a kernel that nobody had run there.
    3: ("tests/phase1_kernels/test_linear.py", "test_every_nibble_in_every_place"),
    # vllm#41511: a group size that a kernel infers; sglang#29178 (row 6): scales cut past their groups.
    7: ("tests/tools/test_inspect.py", "test_groups_that_cannot_be_cut"),
    # vllm#50968: repacking that crashed on one kind of CPU.
    16: ("tests/phase1_kernels/test_linear.py", "test_stored_type_does_not_change_bits"),
    # unslothai/unsloth#4102: more than an hour, modules times modules.
    18: ("tests/checkpoints/test_scale.py", "test_every_tensor_of_kimi_k25_is_accounted_for_within_seconds"),
    # huggingface/transformers#45356: ids that are off by one behind 163588.
    22: ("tests/tokenizers/test_kimi_ids.py", "test_the_slots_of_the_released_tokenizers"),
    # smg#1475: reserved ids without a name end the program.
    25: ("tests/tokenizers/test_kimi_ids.py", "test_every_id_has_a_text"),
    # ai-dynamo/dynamo#7886: reserved names that count from the wrong number.
    26: ("tests/tokenizers/test_kimi_ids.py", "test_names_without_a_config"),
    # vllm#43456: weights of a drafter left out in silence.
    48: ("tests/drafters/test_folders.py", "test_broken_folders"),
    # vllm-ascend#3785, MoonshotAI/Kimi-K2#122: an error at the start that names nothing.
    57: ("tests/checkpoints/test_hostile_folders.py", "test_each_is_refused_by_name"),
}
NOT_HERE = {
    6: "scales are not cut: a model runs on one device; `kdtree inspect` names widths that groups do not allow (row 7)",
    8: "no expert parallelism",
    15: "a build without code for a GPU refuses it before it loads (cpp/backend/cuda/memory.cu); needs such a GPU",
    54: "no parser of tool calls",
}


def test_every_row_has_its_place() -> None:
    """Fails when a test that is named here is renamed or removed, or a row is dropped."""
    for path, name in ELSEWHERE.values():
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (path, name)
    told = "".join(re.sub(r"\s+", " ", path.read_text(encoding="utf-8")) for path in HERE)
    tested = {int(n) for n in re.findall(r"\(row ([0-9]+)\)", told.replace("(row 6)", ""))}
    assert tested | set(ELSEWHERE) | set(NOT_HERE) == ROWS
    assert not set(ELSEWHERE) & set(NOT_HERE)


def test_padded_rows_of_a_recorded_round_reach_nothing(tmp_path: Path) -> None:
    """vllm#42426 (row 1): hours of loading, then "!!!!": NaN from rows of padding, which nobody had written. Here
    fresh memory is NaN (KDTREE_POISON) and a round of five drafts is played from the recording for seven rows."""
    assert os.environ.get("KDTREE_POISON") == "1", "tests/conftest.py sets it"
    engine = Engine.load(write_folder(tmp_path, CONFIG), device="cpu")
    told: dict[str, list[tuple[int | None, float]]] = {}
    for drafter, budget in (("none", 0), ("planted", 5)):
        made = engine.session(512).generate(
            prompt_tokens=PROMPT, max_tokens=24, drafter=drafter, budget=budget, ignore_eos=True, logprobs=1
        )
        told[drafter] = [(e.token, e.logprobs.logprob) for e in made if e.logprobs is not None]
    assert len(told["none"]) == 24 and told["planted"] == told["none"]
    assert np.isfinite([value for _, value in told["planted"]]).all()


def test_pages_that_nobody_filled_reach_nothing(tmp_path: Path) -> None:
    """vllm#57716 (row 2): NaN in unused cache pages, times a probability of zero. The context has room for many
    times the text, the text ends inside a page, and all the rest is NaN."""
    assert os.environ.get("KDTREE_POISON") == "1", "tests/conftest.py sets it"
    engine = Engine.load(write_folder(tmp_path, CONFIG), device="cpu")
    roomy, tight = (engine.session(context).score(PROMPT) for context in (512, len(PROMPT) + 1))
    assert np.isfinite(roomy).all() and (roomy == tight).all()


def test_no_tokenizer_and_no_model_code_of_a_library_that_changes(tmp_path: Path) -> None:
    """thinking-machines-lab/tinker-cookbook#378 (row 24): the tokenizer's import fails, or another one is taken in
    silence. ml-explore/mlx-lm#813 (row 56): a helper that moved between releases of transformers. Loading and
    generating import neither transformers nor torch."""
    write_folder(tmp_path, CONFIG)
    code = (
        "import sys; from kdtree_engine import Engine\n"
        "session = Engine.load(sys.argv[1], device='cpu').session()\n"
        "list(session.generate(prompt_tokens=[1, 2], max_tokens=2, ignore_eos=True))\n"
        "print(sorted({'transformers', 'torch', 'huggingface_hub'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stdout + done.stderr
