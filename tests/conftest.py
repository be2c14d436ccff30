"""Shared by all tests: fresh engine memory is filled with NaN, so that whatever reads what nobody wrote shows
it."""

import os

# numpy's matrices are small here; its threads would wait for each other, for minutes on a busy machine.
for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

os.environ.setdefault("KDTREE_POISON", "1")
