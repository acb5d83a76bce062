"""Arguments of the kit's own classes and functions, read from their source, as importing them takes many seconds."""

from __future__ import annotations

import ast
import copy
import functools
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "lightning_rlhf"


@dataclass(frozen=True)
class Declared:
    """Arguments as declared: names with annotations (``""`` if there is none)."""

    annotations: dict[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all arguments, in order."""
        return tuple(self.annotations)


def declared(path: object) -> Declared | None:
    """Arguments of the class or function at a dotted import path of this package.

    Returns:
        ``None`` if the source alone does not show them: another package, an unknown name, ``**kwargs``, several bases.
    """
    if not isinstance(path, str) or not path.startswith(f"{PACKAGE}."):
        return None
    module, _, name = path.rpartition(".")
    found = _definition(module, name)
    if found is None:
        return None
    module, node = found
    if isinstance(node, ast.FunctionDef):
        return _arguments(module, node.args, skip=0)
    return _of_class(module, node)


def _of_class(module: str, node: ast.ClassDef) -> Declared | None:
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            own = _arguments(module, statement.args, skip=1)
            handed_on = statement.args.kwarg is not None and len(node.bases) == 1
            return _with_those_of_the_base(module, node, statement.args) if own is None and handed_on else own
    if any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list):
        fields = [s for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
        if node.bases:
            return None
        return Declared({s.target.id: _spelt(module, s.annotation) for s in fields if isinstance(s.target, ast.Name)})
    return _of_base(module, node)


def _of_base(module: str, node: ast.ClassDef) -> Declared | None:
    if len(node.bases) == 1 and isinstance(node.bases[0], ast.Name):
        base = _definition(module, node.bases[0].id)
        if base is not None and isinstance(base[1], ast.ClassDef):
            return _of_class(base[0], base[1])
    return None


def _with_those_of_the_base(module: str, node: ast.ClassDef, arguments: ast.arguments) -> Declared | None:
    """Arguments of an ``__init__`` that passes ``**kwargs`` to its only base class, including those of the base."""
    base = _of_base(module, node)
    alone = copy.copy(arguments)
    alone.kwarg = None
    own = _arguments(module, alone, skip=1)
    if base is None or own is None:
        return None
    return Declared(base.annotations | own.annotations)


def _arguments(module: str, arguments: ast.arguments, skip: int) -> Declared | None:
    if arguments.kwarg is not None or arguments.vararg is not None or arguments.posonlyargs:
        return None
    taken = [*arguments.args[skip:], *arguments.kwonlyargs]
    return Declared({a.arg: _spelt(module, a.annotation) if a.annotation else "" for a in taken})


def _spelt(module: str, annotation: ast.expr) -> str:
    """An annotation as text; names of ``Literal[...]`` are replaced by these."""
    if isinstance(annotation, ast.BinOp):
        return f"{_spelt(module, annotation.left)} | {_spelt(module, annotation.right)}"
    return (_literal(module, annotation.id) if isinstance(annotation, ast.Name) else None) or ast.unparse(annotation)


def _literal(module: str, name: str) -> str | None:
    """The ``Literal[...]`` that a name stands for in a module of this package; ``None`` if it is something else."""
    tree = _tree(module)
    for statement in tree.body if tree is not None else ():
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == [name]:
            value = ast.unparse(statement.value)
            return value if value.startswith("Literal[") else None
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{PACKAGE}."):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _literal(str(statement.module), alias.name)
    return None


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef] | None:
    """The definition of a name in a module of this package, found through its imports, and the defining module."""
    tree = _tree(module)
    for statement in tree.body if tree is not None else ():
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)) and statement.name == name:
            return module, statement
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{PACKAGE}."):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return _definition(str(statement.module), alias.name)
    return None


@functools.cache
def _tree(module: str) -> ast.Module | None:
    path = Path(__file__).parents[1].joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if file.is_file():
            return ast.parse(file.read_text(encoding="utf-8"))
    return None
