"""Print the layout: every module and the one job that its docstring names."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("app", "vision", "engine")


def job_of(path: Path) -> str:
    """The first line of the module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n")[0]


def lines_of(folder: Path, depth: int) -> list[str]:
    """One line a module, packages after modules, each level indented."""
    indent = "  " * depth
    modules = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    lines = [f"{indent}{path.name:{26 - len(indent)}} {job_of(path)}" for path in modules]
    for package in sorted(path.parent for path in folder.glob("*/__init__.py")):
        lines += [f"{indent}{package.name}/", *lines_of(package, depth + 1)]
    return lines


def main() -> None:
    for package in PACKAGES:
        print(f"{package}/")
        print("\n".join(lines_of(ROOT / package, 1)))


if __name__ == "__main__":
    main()
