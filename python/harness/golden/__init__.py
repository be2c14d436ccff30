"""Golden bundles: inputs and expected outputs, made by numpy alone. `python -m harness.golden` writes
them."""
