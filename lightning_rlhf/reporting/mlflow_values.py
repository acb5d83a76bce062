"""Values in MLflow's formats: parameters, metrics, cells of tables, times."""

from __future__ import annotations

import json
import math
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from lightning_rlhf.reporting.mlflow_delivery import LONGEST_PARAM, cut, fit_key


def now_ms() -> int:
    """Milliseconds since 1970, MLflow's unit."""
    return int(time.time() * 1000)


def plain(config: Any) -> dict[str, Any]:
    """A configuration or a namespace as a dict."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True)
    return vars(config) if isinstance(config, Namespace) else dict(config)


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Dotted keys, and values as YAML would write them, truncated to MLflow's limits."""
    flat: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[fit_key(f"{prefix}{name}")] = cut(_text(value), LONGEST_PARAM)
    return flat


def _text(value: Any) -> str:
    if isinstance(value, (dict, list, tuple, bool)) or value is None:
        return json.dumps(value, ensure_ascii=False, default=str)
    return str(value)


def number(name: str, value: Any) -> float:
    """The value of a metric.

    Raises:
        TypeError: it is not a number; names the metric.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"metric {name} = {value!r} is not a number") from None


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The JSON text of a table for ``mlflow.load_table``.

    Columns are the keys of all rows in order of appearance; missing values and NaN are empty cells.

    Raises:
        TypeError: names the column whose value JSON cannot hold.
    """
    columns = list(dict.fromkeys(name for row in rows for name in row))
    data = [[cell(name, row.get(name)) for name in columns] for row in rows]
    return json.dumps({"columns": columns, "data": data}, ensure_ascii=False)


def cell(column: str, value: Any) -> Any:
    """A value in JSON types; JSON has no NaN.

    Raises:
        TypeError: JSON cannot hold it; names the column.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return None
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return str(value)  # NaN inside a list: browsers cannot parse it
    except TypeError:
        raise TypeError(f"samples, column {column!r}: {value!r} is not a text, number, list or mapping") from None
    return value
