"""Reports that people look at: results as one page, the rounds of a trace as pictures (docs/cli.md)."""
