"""Measurements against named baselines: `python -m benchmarks NAME [--quick]`. RESULTS.md keeps the last full runs."""
