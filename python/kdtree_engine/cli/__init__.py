"""The ``kdtree`` command: generate, chat, verify, inspect, doctor.

Results go to stdout, logs and progress to stderr. Exit codes are those of :mod:`kdtree_engine.cli.exits`.
Options, environment variables and the JSON objects are described in docs/cli.md.
"""

from kdtree_engine.cli.app import main

__all__ = ["main"]
