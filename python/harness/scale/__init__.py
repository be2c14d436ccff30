"""Arithmetic of scaling up: bytes, memory, step times and break-even points of a model on a system.

    python -m harness.scale [TABLE...] --model k2.6 --format md

Pure arithmetic, no measurement: `inventory` counts bytes from a config, `routing` counts distinct experts, `comm`
holds cost models of the collectives with the published figures that they are fitted to, `hardware` the systems with
the source of every number, `layout` places weights on GPUs, `model` adds up a step, `tables` prints, `documents`
keeps docs/scale_up_k2.6.md and docs/cluster_scaling.md equal to what this program says.
"""
