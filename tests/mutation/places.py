"""Where in a file a mutant lies: whether anything depends on it, and which statement it is part of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tests.mutation.tree import TREE

Place = tuple[int, int]


@dataclass(frozen=True)
class Span:
    first: Place
    last: Place
    why: str

    def holds(self, place: Place) -> bool:
        return self.first <= place < self.last


def span(node: ast.AST, lines: list[str], why: str) -> Span:
    """ast counts columns in bytes, parso in characters."""

    def place(line: int, column: int) -> Place:
        return line, len(lines[line - 1].encode()[:column].decode())

    return Span(place(node.lineno, node.col_offset), place(node.end_lineno, node.end_col_offset), why)  # type: ignore


def without_effect(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.arg(annotation=ast.AST() as found) | ast.AnnAssign(annotation=found):
                yield found, "annotation"
            case ast.FunctionDef(returns=returns):
                if returns is not None:
                    yield returns, "annotation"
                if node.name == "__repr__":
                    yield node, "__repr__"
                for decorator in node.decorator_list:
                    if ast.unparse(decorator) in ("overload", "override", "staticmethod", "torch.no_grad()"):
                        decorator.col_offset -= 1  # of the @
                        yield decorator, f"@{ast.unparse(decorator)}, which no result depends on"
            case ast.Raise(exc=ast.Call(args=arguments)):
                yield from ((argument, "text of a refusal") for argument in arguments)
            case ast.Assert(msg=ast.AST() as message):
                yield message, "text of an assertion"
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield node, "for the type checker"
            case ast.keyword(arg="frozen", value=ast.Constant()):
                yield node, "frozen=True of a dataclass, which guards against no input"
            case ast.ClassDef(bases=bases) if any("Protocol" in ast.unparse(base) for base in bases):
                yield node, "protocol"
            case ast.Assign(value=ast.Call(func=ast.Name(id="TypeVar"))):
                yield node, "type"
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=ast.BitOr())) if name[0].isupper():
                if not name.isupper():
                    yield node, "type"
            case ast.Assign(value=ast.Subscript(value=ast.Name(id="Callable" | "Literal"))):
                yield node, "type"


@cache
def skipped_spans(file: str) -> list[Span]:
    text = (TREE / file).read_text()
    lines = text.splitlines()
    return [span(node, lines, why) for node, why in without_effect(ast.parse(text))]


def why_skipped(file: str, place: Place) -> str | None:
    return next((span.why for span in skipped_spans(file) if span.holds(place)), None)


@cache
def statements(file: str) -> list[tuple[int, int]]:
    """First and last line of each statement; of one that holds others, of its head alone."""
    found = []
    for node in ast.walk(ast.parse((TREE / file).read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            last = max(node.lineno, body[0].lineno - 1) if isinstance(body, list) and body else node.end_lineno
            found.append((node.lineno, last or node.lineno))
    return found


def lines_of(file: str, line: int) -> range:
    around = [found for found in statements(file) if found[0] <= line <= found[1]]
    first, last = min(around, key=lambda found: found[1] - found[0], default=(line, line))
    return range(first, last + 1)


def evaluated_at_import(file: str, line: int) -> tuple[set[str], range]:
    """What a module-level statement names: values, or a class or function with its lines, in whose head it stands."""
    for node in ast.parse((TREE / file).read_text()).body:
        last = node.end_lineno or node.lineno
        if min(node.lineno, *(d.lineno for d in getattr(node, "decorator_list", [])), node.lineno) <= line <= last:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                stored = (name for name in ast.walk(node) if isinstance(name, ast.Name))
                return {name.id for name in stored if isinstance(name.ctx, ast.Store)}, range(0)
            name = getattr(node, "name", None)
            return {name} if name else set(), range(node.lineno, last + 1)
    return set(), range(0)


def lines_that_name(file: str, names: set[str]) -> list[int]:
    word = re.compile(rf"\b({'|'.join(map(re.escape, sorted(names)))})\b")
    return [number for number, line in enumerate((TREE / file).read_text().splitlines(), 1) if word.search(line)]
