"""What Cosmic Ray does not mutate by itself: statements that are left out. A check that is gone is what to find."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cosmic_ray.plugins
import parso
from cosmic_ray.operators.operator import Example, Operator

Position = tuple[tuple[int, int], tuple[int, int]]


class DeleteStatement(Operator):
    """A call whose value nobody takes, `+=` and its like, and a value put into an attribute or under a key."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if self._can_go(node):
            yield node.children[0].start_pos, node.children[0].end_pos

    @staticmethod
    def _can_go(node: Any) -> bool:
        if node.type != "simple_stmt":
            return False
        first = node.children[0]
        if first.type == "expr_stmt":
            target, sign = first.children[0], first.children[1]
            kept_apart = target.type in ("atom_expr", "power") and target.children[-1].type == "trailer"
            return sign.type == "operator" and (sign.value != "=" or kept_apart)
        return first.type in ("atom_expr", "power") and first.get_code(include_prefix=False).endswith(")")

    def mutate(self, node: Any, index: int) -> Any:
        assert index == 0
        first = node.children[0]
        gone = parso.parse("pass").children[0]
        gone.prefix = first.get_first_leaf().prefix
        gone.parent, node.children[0] = node, gone
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("check(x)\n", "pass\n"), Example("x += 1\n", "pass\n"), Example("a.b = 1\n", "pass\n"))


class DeleteRaise(Operator):
    """A refusal that is not said."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type == "simple_stmt" and node.children[0].type == "raise_stmt":
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        return DeleteStatement().mutate(node, index)

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        return (Example("raise ValueError(x)\n", "pass\n"),)


KNOWN = {operator.__name__: operator for operator in (DeleteStatement, DeleteRaise)}


class Provider:
    def __iter__(self) -> Iterator[str]:
        return iter(KNOWN)

    def __getitem__(self, name: str) -> type[Operator]:
        return KNOWN[name]


def register() -> None:
    cosmic_ray.plugins.OPERATOR_PROVIDERS["statements"] = Provider()
