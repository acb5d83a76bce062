"""A callback of the user's own: the template, and the example of the documentation, in real runs."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks.template import StopWhenSolved
from lightning_rlhf.control import Control
from lightning_rlhf.events import STATS, stats_tables
from lightning_rlhf.metrics import names
from lightning_rlhf.metrics.names import UnknownMetricError
from tests.support import FAST, Recorder, even_digits, fit, resume_equals_whole, tiny_module

SCORES = {"EntropyBrake": even_digits}
"""Rewards under which an example of the documentation has something to decide; else every answer is right."""
ROOT = Path(__file__).resolve().parents[2]


def solved(batch: Any) -> list[float]:
    return [1.0] * len(batch.responses)


def test_the_template_ends_a_run_that_is_solved() -> None:
    module = tiny_module(iterations=9, reward=solved)
    fit(module, [StopWhenSolved(score=0.99, patience=3)])
    assert module.control.iteration == 3
    assert module.control.training_stopped == "mean score over 0.99 in 3 iterations in a row"


def test_the_templates_state_survives_a_resume(tmp_path: Path) -> None:
    [callback] = resume_equals_whole(
        tmp_path, lambda: [StopWhenSolved(patience=9)], lambda: tiny_module(iterations=4, reward=solved)
    )
    assert callback.solved == 4


def test_the_template_refuses_bad_settings() -> None:
    with pytest.raises(ValueError, match=r"callbacks.template.patience = 0 is not allowed: a whole number >= 1"):
        StopWhenSolved(patience=0)


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics that an example declares are forgotten afterwards."""
    monkeypatch.setattr(names, "METRICS", list(names.METRICS))


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("page", ["extending.md", "callbacks.md"])
def test_the_documented_example_runs_as_it_stands(page: str) -> None:
    """Every Python block of a page that defines a callback is executed, and its class used in a run."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = [code for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "(RLHFCallback)" in code]
    assert blocks
    for code in blocks:
        names: dict[str, Any] = {"__name__": "my_parts"}
        exec(compile(code, page, "exec"), names)
        [kind] = [v for v in names.values() if isinstance(v, type) and v.__module__ == "my_parts"]
        recorder = Recorder()
        module = tiny_module(iterations=4, reward=SCORES.get(kind.__name__, solved), **FAST)
        trainer = fit(module, [kind(), recorder])
        assert module.control.decisions or module.control.counts["stop_epochs"], f"{kind.__name__} decided nothing"
        if kind.__name__ == "EntropyBrake":
            its_epochs_end_by_entropy_and_its_metric_is_logged(module, trainer, recorder)


def its_epochs_end_by_entropy_and_its_metric_is_logged(module: Any, trainer: Any, recorder: Recorder) -> None:
    """Of a run with large steps and no entropy bonus."""
    assert module.settings.loss.entropy_coefficient == 0
    sampled = [stats.entropy for _, stats in recorder.of("on_experience_ready")]
    ended = recorder.of("on_ppo_epoch_end")
    kept = [stats.entropy / sampled[stats.iteration - 1] for stats in ended]
    assert min(kept) < 0.9 and module.control.counts["stop_epochs"] == sum(share < 0.9 for share in kept)
    last = {stats.iteration: stats.epoch for stats in ended}
    assert all(stats.epoch == last[stats.iteration] for stats, share in zip(ended, kept, strict=True) if share < 0.9)
    assert len(ended) < 4 * module.settings.update.epochs, "fewer epochs than were allowed"
    assert float(trainer.callback_metrics["mine/entropy_kept"]) == pytest.approx(kept[-1])


def test_the_entropy_of_minibatches_costs_no_gradient_and_is_the_policys() -> None:
    """Before the first step it is that of the samples; with and without the bonus it is the same number."""
    found = []
    for coefficient in (0.0, 0.01):
        recorder = Recorder()
        module = tiny_module(iterations=1, loss={"entropy_coefficient": coefficient}, update={"minibatch_size": 16})
        fit(module, [recorder])
        [(_, scored)] = recorder.of("on_experience_ready")
        first, *_ = recorder.of("on_before_step")
        assert first.entropy == pytest.approx(scored.entropy, rel=1e-5)
        [epoch, last] = recorder.of("on_ppo_epoch_end")
        assert (first.entropy, recorder.of("on_minibatch_end")[1].entropy) == (epoch.entropy, last.entropy)
        assert recorder.of("on_update_end")[0].entropy == last.entropy
        found.append(first.entropy)
    assert found[0] == found[1]
    output = module.actor_logprobs(recorder.of("on_minibatch_start")[0])
    assert output.entropy is not None and output.entropy.requires_grad


def test_the_page_lists_every_field_of_every_stats_object() -> None:
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    assert f"-->\n{stats_tables()}<!-- end -->" in text, "print it again, the command stands above the tables"
    for kind in STATS:
        assert all(f"| `{field.name}` |" in stats_tables() for field in dataclasses.fields(kind)), kind


def test_an_undeclared_metric_is_refused_where_it_is_reported() -> None:
    with pytest.raises(UnknownMetricError, match=r"no metric is called 'mine/a'.*register\(Metric\('mine/a', unit="):
        Control().report("mine/a", 1.0)


def test_a_number_that_was_not_measured_is_not_logged() -> None:
    control = Control()
    control.report("entropy/mean", math.nan)
    control.report("kl/ref", math.inf)
    assert control.reported == {"kl/ref": math.inf}, "infinity was measured"
