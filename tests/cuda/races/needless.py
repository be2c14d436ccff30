"""Which barriers of the CUDA kernels does no case need? Each place that orders memory (a barrier, a wait, an arrival)
is made to order nothing, one at a time; kdtree-cuda-races must then report a race in one of the cases of that file.

    python tests/cuda/races/needless.py build/cuda-races/tests/cuda/kdtree-cuda-races [TEXT of the places to look at]

A place without a report is not needed by the cases, or is seen by nothing: look at it before believing either.
grid_wait is judged by whole rounds: other cases have no kernel before theirs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[3] / "cpp/backend/cuda"
PLACE = re.compile(
    r"__syncthreads\(|__syncwarp\(|ptx::(cluster_sync|barrier_wait|barrier_arrive\w*|copy_async_arrive|copy_async_wait<.*>|grid_wait)\("
)
# The start of a file's name, and cases (parts of their names) that run its kernels, quick ones first.
CASES = {
    "attention": ["attend_after_a_commit", "attend_reads_each", "attend_over_equal", "attend_is_softmax"],
    "build_tree": ["build_tree_takes", "build_tree_budgets", "build_tree_orders", "build_tree_equals"],
    "draft_attention": ["several_splits", "committed_keys_equal_block", "block_attend_is_softmax", "block_attend_rows"],
    "draft_rows": ["norm_rotate", "write_key_value", "keep_taps", "drafts_equal"],
    "experts": ["experts_of_many", "experts_of_none", "experts_sum", "the_same_bits"],
    "gemm_round": ["linear_is_the_product", "the_same_bits"],
    "fma_gemm": ["linear_is_the_product", "gated_linear_is", "absorb_query", "experts_of_many", "the_same_bits"],
    "gemm": ["linear_is_the_product", "gated_linear_is", "linear_rows", "experts_of_many", "experts_of_none",
             "in_pieces"],
    "read_rate": ["read_rate"],
    "repack": ["weights_that_are_not", "int4_equals"],
    "router": ["route_stays", "route_of_saturated", "route_ties", "the_same_bits", "route_chooses"],
    "rows": ["rms_norm", "embed", "gather_rows", "write_latent", "commit_moves", "the_same_bits"],
    "sampling": ["top_k_filter", "min_p", "greedy_finds", "draws_follow", "top_p", "top_k_tokens", "the_same_bits",
                 "sampled_select", "select_from_rows"],
    "select": ["top_k_filter", "min_p", "greedy_finds", "draws_follow", "top_p", "the_same_bits", "sampled_select",
               "select_from_rows"],
    "top_k": ["top_k_tokens", "the_same_bits"],
    "tree": ["tree_rows", "accept", "drafts_equal"],
}


def places(text: str) -> list[tuple[str, list[str]]]:
    """FILE:LINE of each place whose name has `text` in it, and the cases that should notice."""
    found = []
    for file in sorted([*KERNELS.glob("*.cu"), *KERNELS.glob("*.cuh")]):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if match := PLACE.search(line.split("//")[0]):
                cases = next((c for start, c in CASES.items() if file.name.startswith(start)), [])
                found.append((f"{file.name}:{number}", ["rounds_of"] if "grid_wait" in match[0] else cases))
    return [(place, cases) for place, cases in found if text in place]


def who_notices(program: str, place: str, cases: list[str]) -> str | None:
    for case in cases:
        run = subprocess.run(
            [program, "--small", "--filter", case],
            env={**os.environ, "KDTREE_RACES_WITHOUT": place}, capture_output=True, text=True, check=False,
        )
        if " data races" in run.stdout:
            return case
        if run.returncode not in (0, 1):
            return f"{case} (ended with {run.returncode})"
    return None


def main() -> int:
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    looked_at = places(sys.argv[2] if len(sys.argv) == 3 else "")
    needless = 0
    for place, cases in looked_at:
        case = who_notices(sys.argv[1], place, cases)
        needless += case is None
        print(f"{place:32} {case or 'NOTHING NOTICED'}", flush=True)
    print(f"{len(looked_at)} places, {needless} of which no case needs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
