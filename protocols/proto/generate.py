"""Compile every .proto in this folder: `python -m protocols.proto.generate`, in an environment with grpcio-tools 1.71.

Generated code refuses a protobuf runtime older than its compiler, so the compiler is the oldest that our bounds
admit (protobuf 5.29, grpcio 1.71); newer runtimes take it. Hence an environment of its own:
`python -m venv .venv-proto && .venv-proto/bin/pip install "grpcio-tools==1.71.*" "setuptools<81"`.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

COMPILER = "1.71."
FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


def schemas() -> list[str]:
    """Paths from the repository's root, as the generated imports will name them."""
    return sorted(path.relative_to(ROOT).as_posix() for path in FOLDER.glob("*.proto"))


def generate(out: Path) -> None:
    """Messages and type stubs for all; gRPC stubs only where a service is defined."""
    import grpc_tools  # only developers have it
    from grpc_tools import protoc

    well_known = Path(grpc_tools.__file__).parent / "_proto"
    for schema in schemas():
        arguments = [
            "protoc",
            f"-I{ROOT}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            schema,
        ]
        if "\nservice " in (ROOT / schema).read_text():
            arguments.insert(-1, f"--grpc_python_out={out}")
        if protoc.main(arguments) != 0:
            raise SystemExit(f"{schema} does not compile")


if __name__ == "__main__":
    if not version("grpcio-tools").startswith(COMPILER):
        sys.exit(f"grpcio-tools {version('grpcio-tools')}: need {COMPILER}*, see the head of {__file__}")
    generate(ROOT)
