"""`python -m benchmarks NAME [--quick] [--size]`: one benchmark, or `all`. Exit code 1 when a bar fails."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from benchmarks.bars import save_section

NAMES = (
    "throughput",
    "simulator",
    "swarm_churn",
    "wire",
    "skipping",
    "gpu",
    "planner",
    "live_paths",
    "averaging",
    "exchange",
    "recovery",
    "chaos",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure the bars that Gossamer must hold."
    )
    parser.add_argument("name", choices=(*NAMES, "all"))
    parser.add_argument("--quick", action="store_true", help="smaller samples; RESULTS.md is left as it is")
    parser.add_argument("--size", choices=("tiny", "178m"), help="recovery's model; 178m needs a CUDA card")
    options = parser.parse_args(arguments)
    if options.size and options.name != "recovery":
        parser.error("--size is recovery's alone")
    chosen = NAMES if options.name == "all" else (options.name,)
    # a failed one does not stop the others
    passed = [run_one(name, quick=options.quick, size=options.size) for name in chosen]
    return 0 if all(passed) else 1


def run_one(name: str, *, quick: bool, size: str | None = None) -> bool:
    """Run, print, keep. A skipped benchmark leaves the kept table of a machine that could run it."""
    print(f"== {name}", flush=True)
    run = import_module(f"benchmarks.{name}").run
    report = run(quick=quick) if size is None else run(quick=quick, size=size)
    print("\n".join(report.lines()), flush=True)
    if not quick and not report.skipped:
        save_section(name if size in (None, "tiny") else f"{name}_{size}", report)
    return report.passed


if __name__ == "__main__":
    sys.exit(main())
