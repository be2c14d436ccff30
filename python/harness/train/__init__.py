"""Trains a small Kimi-K2-style model and its DFlash drafter, from packages to folders that the engine loads.

``python -m harness.train corpus | target | drafter | evaluate``; docs/training.md says how. torch is imported by
the stages that train, and nowhere else in the repository.
"""
