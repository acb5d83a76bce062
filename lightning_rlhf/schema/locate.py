"""The class or function at a dotted import path, or a sentence that says why it cannot be imported."""

from __future__ import annotations

import importlib
import inspect
import re
from difflib import get_close_matches
from typing import Any


def locate(path: Any) -> Any:
    """The class or function at a dotted import path.

    Raises:
        LookupError: it cannot be imported; says why: an unknown name (and the nearest one), a package that is not
            installed, or an error in the file.
    """
    if not isinstance(path, str) or not re.fullmatch(r"\w+(\.\w+)+", path):
        raise LookupError("the import path of a class or function, such as my_file.MyReward")
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{name}.".startswith(f"{error.name}."):
                continue  # the last part may be an attribute of a class
            raise LookupError(f"{name} needs the package {error.name}, which is not installed") from error
        except Exception as error:  # the user's file runs here and may raise anything
            raise LookupError(f"{name} cannot be imported: {type(error).__name__}: {error}") from error
        for attribute in parts[length:]:
            if not hasattr(found, attribute):
                names = [n for n, v in inspect.getmembers(found) if not n.startswith("_") and not inspect.ismodule(v)]
                near = get_close_matches(attribute, names, n=1, cutoff=0.5)
                guess = f"; did you mean {name}.{near[0]}?" if near else ""
                raise LookupError(f"{name} has no {attribute!r}{guess}")
            found, name = getattr(found, attribute), f"{name}.{attribute}"
        return found
    raise LookupError(f"there is no module {parts[0]!r}; is it in the current folder, installed, or on PYTHONPATH?")


def parameters_of(target: Any) -> dict[str, inspect.Parameter]:
    """Parameters of a callable; ``__init__(*args, **kwargs)`` also takes those of the next class in the MRO."""
    found: dict[str, inspect.Parameter] = {}
    for cls in target.__mro__[:-1] if inspect.isclass(target) else ():
        if "__init__" not in vars(cls):
            continue
        parameters = list(inspect.signature(vars(cls)["__init__"]).parameters.values())[1:]
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        found = {p.name: p for p in named} | found
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return found
    try:
        return dict(inspect.signature(target).parameters)  # not a class, or every class in the MRO has **kwargs
    except ValueError:  # of a type written in C: anything may be handed over
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}
