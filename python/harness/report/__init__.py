"""Reports that people look at. ``python -m harness.report tree FILE`` draws the rounds of a trace."""
