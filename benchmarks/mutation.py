"""The mutants of a module's source: one operator, constant, call or statement changed in each."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

COMPARISONS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
OPPOSITES = {
    **{"min": "max", "max": "min", "amin": "amax", "amax": "amin", "minimum": "maximum", "maximum": "minimum"},
    **{"any": "all", "all": "any"},
}
KEYWORDS = {"min": "max", "max": "min"}
"""Of ``clamp(min=1)``."""
UNSEEN = (ast.JoinedStr, ast.Raise, ast.Assert, ast.Import, ast.ImportFrom)
"""Texts, and what has no operator of ours."""


def places(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that are executed, in source order, without annotations and strings."""
    if isinstance(node, UNSEEN):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from places(child)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every node that may replace this one, with the kind of change."""
    if isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            operators: list[Any] = list(node.ops)
            operators[i] = COMPARISONS[type(operator)]()
            yield "comparison", ast.Compare(node.left, operators, node.comparators)
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS and not _is_type(node):
        changed: Any = copy.copy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield "operator", changed
    elif isinstance(node, ast.BoolOp):
        yield "and/or", ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and not _is_dimension(node):
        yield "sign or not", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = not node.value if isinstance(node.value, bool) else node.value + 1
        yield "constant", ast.Constant(value)
    elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
        yield "return", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "statement", ast.Pass()
    elif isinstance(node, ast.Call):
        yield from _of_call(node)


def _of_call(node: ast.Call) -> Iterator[tuple[str, ast.AST]]:
    function = node.func
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    if name in OPPOSITES:
        other = copy.copy(function)
        setattr(other, "id" if isinstance(function, ast.Name) else "attr", OPPOSITES[name])
        yield "min/max", ast.Call(other, node.args, node.keywords)
    for i, keyword in enumerate(node.keywords):
        if name == "clamp" and keyword.arg in KEYWORDS:
            keywords = list(node.keywords)
            keywords[i] = ast.keyword(KEYWORDS[keyword.arg], keyword.value)
            yield "min/max", ast.Call(function, node.args, keywords)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_dimension(node: ast.UnaryOp) -> bool:
    """``-1``, the last dimension, which of two is 1 as well. The constant in it makes its own mutant."""
    return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant) and node.operand.value == 1


def _is_type(node: ast.AST) -> bool:
    """``str | None`` outside an annotation, or ``{...} | {...}`` of dictionaries, for which ``&`` always fails."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr) and (
        _is_none(node.right) or isinstance(node.right, (ast.Dict, ast.DictComp))
    )  # fmt: skip


def mutants(source: str) -> dict[str, tuple[int, ast.Module]]:
    """Every mutant of a module by its description, with line and changed tree."""
    tree = ast.parse(source)
    found: dict[str, tuple[int, ast.Module]] = {}
    for node in list(places(tree)):
        for kind, other in changes(node):
            text = f"{kind}: {_short(node)} -> {_short(other)}"
            position = f"{getattr(node, 'lineno', 0)}:{getattr(node, 'col_offset', 0)}"
            found[f"{position} {text}"] = (getattr(node, "lineno", 0), _exchanged(tree, node, other))
    return found


def _short(node: ast.AST) -> str:
    text = re.sub(r"\s+", " ", ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))))
    return text if len(text) <= 90 else text[:87] + "..."


class _Exchange(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        if node is self.old:
            return ast.copy_location(self.new, node)
        return self.generic_visit(_shallow(node))


def _shallow(node: ast.AST) -> ast.AST:
    """A copy with its own lists, so that the original tree does not change."""
    new = copy.copy(node)
    for name, value in ast.iter_fields(node):
        if isinstance(value, list):
            setattr(new, name, list(value))
    return new


def _exchanged(tree: ast.Module, old: ast.AST, new: ast.AST) -> ast.Module:
    return ast.fix_missing_locations(_Exchange(old, new).visit(tree))
