"""Shared by all tests: fresh engine memory is filled with NaN, so that whatever reads what nobody wrote shows it."""

import os

os.environ.setdefault("KDTREE_POISON", "1")
