"""Measurements against named baselines. `python -m benchmarks NAME [--quick]`; the last full tables are in RESULTS.md."""
