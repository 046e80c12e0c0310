"""README's file tree, made from the modules' own docstrings: `make tree` rewrites it, a test compares it."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- tree: make tree -->\n```\n", "```\n<!-- /tree -->"
PACKAGES = ("protocols", "dht", "peer")
NAME_COLUMNS = 26
LINE_COLUMNS = 120


def summary(module: Path) -> str:
    """The first sentence of a module's docstring, shortened at a comma or semicolon when it is long."""
    paragraph = (ast.get_docstring(ast.parse(module.read_text("utf-8"))) or "").split("\n\n")[0]
    sentence = " ".join(paragraph.split()).split(". ")[0].rstrip(".")
    room = LINE_COLUMNS - NAME_COLUMNS
    while len(sentence) > room:
        cut = max(sentence.rfind(mark, 0, -1) for mark in (", ", "; ", ": "))
        if cut <= 0:
            return sentence[: sentence.rfind(" ", 0, room)]
        sentence = sentence[:cut]
    return sentence if sentence.count("(") == sentence.count(")") else sentence[: sentence.rfind(" (")]


def is_written_by_hand(path: Path) -> bool:
    return "_pb2" not in path.name


def folder_lines(folder: Path, depth: int) -> list[str]:
    """The folder's line, its modules in alphabetical order, then the folders in it that hold modules."""
    modules = [
        path for path in sorted(folder.glob("*.py")) if is_written_by_hand(path) and path.stem != "__init__"
    ]
    lines = [entry(folder.name + "/", summary(folder / "__init__.py"), depth)]
    lines += [entry(module.name, summary(module), depth + 1) for module in modules]
    for inner in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += folder_lines(inner, depth + 1)
    return lines


def entry(name: str, text: str, depth: int) -> str:
    return f"{'  ' * depth + name:<{NAME_COLUMNS}}{text}".rstrip()


def tree() -> str:
    return "".join(line + "\n" for package in PACKAGES for line in folder_lines(ROOT / package, 0))


def parts_of_readme() -> tuple[str, str, str]:
    """README before the tree, the tree, README after it."""
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    inside, _, after = rest.partition(END)
    return before, inside, after


def main() -> int:
    before, _, after = parts_of_readme()
    README.write_text(before + BEGIN + tree() + END + after, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
