"""``python -m kdtree_engine.cli`` is ``kdtree``."""

from kdtree_engine.cli import main

main()
