"""How the files depend on each other: what an auditor of the private step must open, and no circles anywhere.

All imports count: inside functions and for types alone too. import-linter holds the layers; here it is files.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("accounting", "contrib", "data", "evaluation", "launch", "model", "train")
MOST_FILES_TO_AUDIT, MOST_FILES_OF_A_LIBRARY_RUN = 33, 112
OF_OPTIONS = (
    "accounting.certificate.composition", "accounting.certificate.withdrawal", "accounting.epsilon.affordable",
    "accounting.epsilon.allocation", "accounting.epsilon.audit_bound", "accounting.epsilon.tuning",
    "data.batch.held_out", "data.batch.reading_processes", "data.draw.normalisation", "data.index", "data.store.tar",
    "train.clip.compiled", "train.commands", "train.config.root", "train.distributed.watchdog", "train.engines.fsdp2",
    "train.engines.measures", "train.engines.sharded_sums", "train.noise.chacha", "train.noise.correlated",
    "train.noise.exact", "train.noise.metrics", "train.optim.optimizers", "train.optim.probed_rate", "train.recipe",
    "train.storage.sibling_runs",
)  # fmt: skip
"""Files and folders of which a library run without options needs nothing: whoever reads what runs need not read them,
and nobody waits for their imports."""


def modules() -> dict[str, Path]:
    """Every module by its name in imports; a folder stands for its __init__.py."""
    found = {}
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(("murmuration", *parts)).removesuffix(".__init__")] = path
    return found


def at_load(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements that run when a file is imported."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if not isinstance(node, ast.FunctionDef) and not for_types:
            yield node
            yield from at_load(node)


def named_in(path: Path, name: str, walk: Callable[[ast.AST], Iterator[ast.AST]] = ast.walk) -> Iterator[str]:
    """What a file's import statements name, wherever they stand; `from a import b` may mean the module a.b."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def imports(walk: Callable[[ast.AST], Iterator[ast.AST]] = ast.walk) -> dict[str, set[str]]:
    """The files that each file imports, without the packages that they lie in."""
    known = modules()
    files = {name for name, path in known.items() if path.name != "__init__.py"}
    return {name: (set(named_in(known[name], name, walk)) & files) - {name} for name in files}


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


def test_a_library_run_loads_few_files_and_none_of_options() -> None:
    reached = closure("murmuration.train.library.training", imports(at_load))
    assert {"murmuration.train.step", "murmuration.accounting.ledger.journal"} <= reached, "imports are no longer found"
    assert len(reached) <= MOST_FILES_OF_A_LIBRARY_RUN, sorted(reached)
    for other in OF_OPTIONS:
        assert f"murmuration.{other}" in modules(), f"{other} has another name now"
        assert not {name for name in reached if name.startswith(f"murmuration.{other}")}, other


def test_no_files_import_each_other_in_a_circle() -> None:
    graph = imports()
    circles = {name for name, direct in graph.items() if any(name in closure(other, graph) for other in direct)}
    assert not circles, sorted(circles)


def test_no_import_hides_in_an_init() -> None:
    """Which is not counted above."""
    busy = [name for name, path in modules().items() if path.name == "__init__.py" and set(named_in(path, name))]
    assert not busy


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_file_has_one_name(folder: str) -> None:
    """From the root of a checkout, where the folder itself could be imported: that would make two classes of each."""
    inner = next(path.stem for path in sorted((ROOT / folder).glob("[a-z]*.py")))
    for name in (folder, f"{folder}.{inner}"):
        with pytest.raises(ImportError, match=rf"^import murmuration\.{folder}, not {folder}: "):
            import_module(name)


def test_tools_are_told_of_every_folder_by_the_name_that_they_need() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert tuple(tools["coverage"]["run"]["source"]) == FOLDERS
    assert set(tools["pyright"]["include"]) == {f"murmuration/{name}" for name in (*FOLDERS, "__main__.py")}
