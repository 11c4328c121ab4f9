"""How the files depend on each other: what an auditor of the private step must open, and no circles anywhere.

All imports count: inside functions and for types alone too. import-linter holds the layers; here it is files.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("accounting", "contrib", "data", "evaluation", "launch", "model", "train")
MOST_FILES_TO_AUDIT = 40


def modules() -> dict[str, Path]:
    """Every module by its name in imports; a folder stands for its __init__.py."""
    found = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("murmuration", *parts)).removesuffix(".__init__")] = path
    return found


def named_in(path: Path, name: str) -> Iterator[str]:
    """What a file's import statements name, wherever they stand; `from a import b` may mean the module a.b."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports() -> dict[str, set[str]]:
    """The files that each file imports, without the packages that they lie in."""
    known = modules()
    files = {name for name, path in known.items() if path.name != "__init__.py"}
    return {name: (set(named_in(known[name], name)) & files) - {name} for name in files}


def closure(of: str, graph: dict[str, set[str]]) -> set[str]:
    reached, waiting = set[str](), [of]
    while waiting:
        here = waiting.pop()
        if here not in reached:
            reached.add(here)
            waiting += graph[here]
    return reached


def test_the_private_step_can_be_audited_with_few_files() -> None:
    reached = closure("murmuration.train.step", imports())
    assert len(reached) > 20, "imports are no longer found"
    assert len(reached) <= MOST_FILES_TO_AUDIT, sorted(reached)


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    circles = {name for name, direct in graph.items() if any(name in closure(other, graph) for other in direct)}
    assert not circles, sorted(circles)


def test_no_import_hides_in_an_init() -> None:
    """Which is not counted above."""
    busy = [name for name, path in modules().items() if path.name == "__init__.py" and set(named_in(path, name))]
    assert not busy
