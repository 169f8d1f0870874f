"""Counts the lines of src by package: all, and those of code, docstrings, comments and blanks.

python benchmarks/lines.py
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1] / "src" / "tntprune"


def count(path: Path) -> Counter[str]:
    """Return how many lines of each kind a file has."""
    text = path.read_text()
    lines = text.splitlines()
    docs: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            docs |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    found: Counter[str] = Counter(lines=len(lines))
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        kind = "docs" if number in docs else "blank" if not bare else "comments" if bare[0] == "#" else "code"
        found[kind] += 1
    return found


def main() -> None:
    """Print a line per package, the largest first."""
    packages: dict[str, Counter[str]] = {}
    for path in ROOT.rglob("*.py"):
        name = path.relative_to(ROOT).parts[0] if path.parent != ROOT else "(root)"
        packages[name] = packages.get(name, Counter()) + count(path)
    kinds = ("lines", "code", "docs", "comments", "blank")
    print(f"{'package':14}", *(f"{kind:>9}" for kind in kinds))
    packages = dict(sorted(packages.items(), key=lambda item: -item[1]["lines"]))
    for name, found in {**packages, "all": sum(packages.values(), Counter())}.items():
        print(f"{name:14}", *(f"{found[kind]:9,}" for kind in kinds))
    print(f"modules in the root: {len([*ROOT.glob('*.py')])}")


if __name__ == "__main__":
    main()
