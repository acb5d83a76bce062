"""The registry of metrics: every name can be stored, has a complete entry, and the printed pages are current."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.metrics import names
from lightning_rlhf.metrics.names import (
    METRICS,
    REDUCTIONS,
    Metric,
    UnknownMetricError,
    aliases_table,
    check,
    find,
    is_ours,
    metrics_table,
    register,
    valid,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(names, "METRICS", list(METRICS))
    yield


def example(name: str) -> str:
    return re.sub("<[a-z_]+>", "some_Name.0-1", name)


def test_every_entry_is_complete() -> None:
    for metric in METRICS:
        assert metric.unit and metric.reduced in REDUCTIONS and metric.better in ("up", "down", "neither"), metric
        assert metric.description.endswith(".") and len(metric.description) > 10, metric
        assert metric.aliases.keys() <= {"verl", "trl", "openrlhf", "sb3"}, metric
        assert metric.unit != "nats/token" or metric.reduced in ("tokens", "steps", "max"), metric


def test_mlflow_takes_every_name_as_it_is() -> None:
    from mlflow.utils.validation import _validate_metric_name

    for metric in METRICS:
        _validate_metric_name(example(metric.name))
        assert valid(example(metric.name))


@pytest.mark.parametrize("name", ["a@1", "a,b", "a/", "/a", "a//b", "a/./b", "a/../b", " a", "a /b", "", "ü", "a:b"])
def test_names_that_trackers_change_or_refuse_are_not_valid(name: str) -> None:
    assert not valid(name)


@pytest.mark.parametrize("name", ["a", "a/b", "a.b/c-d_e f", "lr-AdamW/actor", "val-core/x/mean_at_8"])
def test_other_names_are_valid(name: str) -> None:
    assert valid(name)


def test_no_two_names_become_one() -> None:
    """Neither where characters are stripped or replaced, nor on file systems that ignore case."""
    for change in (r"[^a-z0-9_/. -]+", r"[^a-z0-9]+"):
        for replacement in ("", "_"):
            changed = [re.sub(change, replacement, metric.name.lower()) for metric in METRICS]
            assert len(set(changed)) == len(METRICS)
    folders = {metric.name.rpartition("/")[0] for metric in METRICS}
    assert not folders & {metric.name for metric in METRICS}  # a name is never a folder of another


def test_names_people_know_are_there() -> None:
    check(["reward/mean", "kl/ref", "kl/old", "ppo/clip_fraction", "ppo/ratio_max", "ppo/epochs_used", "entropy/mean"])
    check(["grad_norm/actor", "grad_norm/critic", "value/explained_variance", "response/length_mean"])
    check(["response/truncated_fraction", "perf/tokens_per_second", "time/rollout", "stability/rollbacks"])
    check(["clock/iteration", "clock/update"])


def test_unknown_names_are_refused_with_the_nearest_spelling() -> None:
    with pytest.raises(UnknownMetricError, match=r"'kl/reff'; did you mean 'kl/ref'\?.*'ppo/ratio_maxx'; did you mean"):
        check(["reward/mean", "kl/reff", "ppo/ratio_maxx"])
    with pytest.raises(UnknownMetricError, match=r"no metric is called 'zzz'\. .*register\(Metric\('zzz', unit='1'"):
        check(["zzz"])


def test_families_take_one_part_of_any_spelling() -> None:
    check(["reward/term/exact_match", "eval/exact_match", "grad_norm/alp", "stability/lr_scale_multiplier", "lr/actor"])
    for name in ("reward/term/", "reward/term/a/b", "reward/term", "eval/a@1", "stability/rollback"):
        with pytest.raises(UnknownMetricError, match=f"no metric is called '{name}'"):
            check([name])


def test_the_most_specific_metric_is_found() -> None:
    for metric in METRICS:
        assert find(example(metric.name)) is metric
    assert find("kl/nothing") is None


def test_groups_of_the_kit() -> None:
    assert is_ours("kl/whatever") and is_ours("reward/term/a")
    assert not is_ours("my/loss") and not is_ours("kl") and not is_ours("lr-AdamW/actor")


def test_a_users_metric_is_registered_once(own_registry: None) -> None:
    mine = Metric("loss/mine_<kind>", "1", "down", "steps", "A term of my own.")
    with pytest.raises(UnknownMetricError):
        check(["loss/mine_a"])
    register(mine)
    register(mine)
    check(["loss/mine_a"])
    assert names.METRICS.count(mine) == 1 and is_ours("loss/x")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (Metric("loss@1", "1", "down", "steps", "A loss."), "'loss@1' is not allowed"),
        (Metric("loss/a", "1", "down", "average", "A loss."), "reduced = 'average' is not allowed: one of tokens"),
        (
            Metric("loss/a", "1", "lower", "once", "A loss."),
            "better = 'lower' is not allowed: one of up, down, neither",
        ),  # type: ignore[arg-type]
        (Metric("kl/ref", "1", "down", "steps", "Another KL."), "'kl/ref' is taken by kl/ref: KL"),
        (Metric("KL/ref", "1", "down", "steps", "Another KL."), "'KL/ref' is taken by kl/ref"),
    ],
)
def test_invalid_metrics_cannot_be_registered(own_registry: None, metric: Metric, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        register(metric)


# --- the code and the registry agree ---------------------------------------------------------------------------------


def written_names() -> set[str]:
    """Strings in the package that look like metric names; what an f-string fills in becomes ``*``."""
    groups = {metric.name.partition("/")[0] for metric in METRICS}
    found = set()
    for folder in ("lightning_rlhf", "callbacks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name in ("names.py", "names_prompts.py") or "reporting" in path.parts:
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                text = ""
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    text = node.value
                elif isinstance(node, ast.JoinedStr):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in node.values)
                if re.fullmatch(rf"({'|'.join(groups)})/[A-Za-z0-9_*/]+", text):
                    found.add(text)
    return found


def stands_for(written: str, metric: Metric) -> bool:
    """Whether a name as written in the code, ``*`` for what an f-string fills in, can be the metric."""
    pattern = re.escape(written).replace(r"\*", r"[A-Za-z0-9_.\-]+")
    return metric.matches(written.replace("*", "x")) or re.fullmatch(pattern, example(metric.name)) is not None


def test_the_code_logs_registered_names_only() -> None:
    written = {name for name in written_names() if not name.endswith(("/", "_"))}  # the beginnings of f-strings
    assert len(written) > 40
    assert [name for name in written if not any(stands_for(name, metric) for metric in METRICS)] == []


def test_every_registered_metric_is_logged_somewhere() -> None:
    """A user would wait in vain for a documented metric that is never logged."""
    written = written_names()
    assert [metric.name for metric in METRICS if not any(stands_for(name, metric) for name in written)] == []


# --- the printed pages -----------------------------------------------------------------------------------------------


def test_the_page_of_metrics_is_current() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == metrics_table(), (
        "run: python -c \"from lightning_rlhf.metrics.names import metrics_table; print(metrics_table(), end='')\" "
        "> docs/metrics.md"
    )


def test_the_page_for_newcomers_is_current() -> None:
    page = (ROOT / "docs" / "coming-from-verl-trl-openrlhf.md").read_text(encoding="utf-8")
    assert page.partition("<!-- metrics -->\n")[2].partition("<!-- end of metrics -->")[0] == aliases_table(), (
        "put the output of lightning_rlhf.metrics.names.aliases_table() between the two comments"
    )


def test_the_keys_on_that_page_exist(compose: Callable[..., Any]) -> None:
    from omegaconf import OmegaConf

    page = (ROOT / "docs" / "coming-from-verl-trl-openrlhf.md").read_text(encoding="utf-8")
    rows = page.partition("<!-- keys -->\n")[2].partition("<!-- end of keys -->")[0].splitlines()[2:]
    keys = [row.split("|")[2].strip().strip("`") for row in rows]
    config = compose("model=hf", "model.source.path=some/model", "callbacks=[default,adaptive_kl]")
    absent = object()
    assert len(keys) > 30
    assert [key for key in keys if OmegaConf.select(config, key, default=absent) is absent] == []


def test_tables_have_as_many_cells_in_every_row() -> None:
    for text in (metrics_table(), aliases_table()):
        blocks = re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
        for block in blocks:
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in block.splitlines()}) == 1
    assert r"KL(current \|\| reference)" in metrics_table()
    assert r"| `kl/old` | `actor/ppo_kl` (k1, may be negative) |" in aliases_table()
