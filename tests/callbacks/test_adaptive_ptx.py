"""AdaptivePTX: the controllers by hand, real probes, resumed runs, and what it refuses."""

from __future__ import annotations

import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_rlhf.callbacks import AdaptivePTX
from lightning_rlhf.control import Control
from lightning_rlhf.data.corpus import text_blocks
from lightning_rlhf.errors import InputError
from lightning_rlhf.runs.ending import in_short
from lightning_rlhf.settings import SettingError
from lightning_rlhf.supervise import files
from lightning_rlhf.supervise.ending import recorded
from tests.support import (
    DecisionLog,
    Recorder,
    experience_stats,
    fit,
    resume_equals_whole,
    same,
    tiny_module,
    tiny_policy,
    weights,
)

TEXT = [{"text": " ".join(f"{a}*{b}={a * b}" for b in range(12))} for a in range(10)]
PTX: dict[str, Any] = {"source": TEXT, "length": 16, "tokens_per_step": 48, "held_out": 3}
NOTHING: Any = None


def ptx_module(**changes: Any) -> Any:
    return tiny_module(**{"ptx": PTX, "iterations": 4} | changes)


def with_scores(callback: AdaptivePTX, *scores: float) -> AdaptivePTX:
    for score in scores:
        callback.on_experience_ready(NOTHING, NOTHING, NOTHING, experience_stats(score_mean=score))
    return callback


# --- the controllers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", [0.9999, 1.0, 1.0001, 1.02])
def test_pid_lowers_gamma_to_its_bound_where_nothing_is_lost(capability: float) -> None:
    """Also where capability is above its baseline, and the loss of it below 0."""
    callback, gamma = AdaptivePTX(mode="pid"), 0.05
    for _ in range(300):
        gamma = callback.next_coefficient(gamma, capability)
    assert gamma == pytest.approx(callback.minimum)


def test_doubling_by_hand() -> None:
    """Smoothing 0.5 waits for two probes: sqrt(0.9 x 1) is below 0.97, and so is 0.9 after an average of it with 1."""
    callback = AdaptivePTX(tolerance=0.97, smoothing=0.5, maximum=0.3)
    gammas, kept, gamma = [], [], 0.1
    for capability in (1.0, 0.9, 0.99, 0.96, 0.5, 0.5, 0.5, 0.5):
        gamma = callback.next_coefficient(gamma, capability)
        gammas.append(gamma)
        kept.append(callback.kept)
    assert gammas == [0.1, 0.2, 0.2, 0.2, 0.3, 0.3, 0.3, 0.3]
    expected = [1.0, math.sqrt(0.9), 0.99, math.sqrt(0.99 * 0.96), math.sqrt(math.sqrt(0.99 * 0.96) * 0.5)]
    assert kept[:5] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("scores", "capability", "halved"),
    [
        ([0.1, 0.1, 0.5, 0.5, 0.5, 0.5], 0.98, True),  # the reward stalls
        ([0.1, 0.1, 0.5, 0.5, 0.5, 0.5], 0.96, False),  # but the last probe is below the tolerance
        ([0.1, 0.1, 0.5, 0.5, 0.52, 0.52], 0.98, False),  # it rose by a twentieth of the gain of 0.42
        ([0.1, 0.1, 0.5, 0.5, 0.504, 0.504], 0.98, True),  # by less than a hundredth
        ([0.1, 0.5, 0.5], 0.98, False),  # fewer than two windows
        ([0.5, 0.5, 0.4, 0.4], 0.98, True),  # it falls
    ],
)
def test_gamma_halves_where_the_reward_stalls_and_the_capability_is_stable(
    scores: list[float], capability: float, halved: bool
) -> None:
    callback = with_scores(AdaptivePTX(tolerance=0.97, smoothing=0.5, window=2), *scores)
    callback.next_coefficient(0.1, 1.0)
    assert callback.next_coefficient(0.1, capability) == (0.05 if halved else 0.1)


def test_pid_by_hand() -> None:
    """e = log(loss / allowed loss): with tolerance 0.98 the loss of 0.98 ** 2 is twice the allowed one."""
    callback = AdaptivePTX(mode="pid", tolerance=0.98, smoothing=0.0, kp=0.5, ki=0.1, kd=0.0)
    first = callback.next_coefficient(0.1, 0.98**2)
    assert first == pytest.approx(0.1 * 2**0.6)
    assert callback.next_coefficient(first, 0.98) == pytest.approx(0.1 * 2**0.1)
    assert callback.next_coefficient(first, 1.1) < 0.1, "more capability than at the start"


@pytest.mark.parametrize("mode", ["doubling", "pid"])
def test_the_baseline_moves_nothing_and_begins_the_average(mode: Any) -> None:
    """Also in a run whose reward stalls, where a text of its own is measured anew."""
    callback = with_scores(AdaptivePTX(mode=mode, smoothing=0.0, window=1), 0.5, 0.5)
    assert callback.next_coefficient(0.05, 1.0, baseline=True) == 0.05
    assert (callback.average, callback.kept) == (0.0, 1.0) and callback.pid.origin is None
    expected = {"doubling": 0.025, "pid": 0.05 * (-math.log(0.99) / -math.log(0.98)) ** 0.6}
    assert callback.next_coefficient(0.05, 0.99) == pytest.approx(expected[mode], rel=1e-12)


@pytest.mark.parametrize("mode", ["doubling", "pid"])
def test_a_probe_that_is_not_finite_moves_nothing(mode: Any) -> None:
    callback = AdaptivePTX(mode=mode, smoothing=0.0)
    callback.next_coefficient(0.1, 0.99)
    before = callback.state_dict()
    assert callback.next_coefficient(0.1, math.nan) == 0.1 and callback.state_dict() == before
    assert math.isnan(callback.kept)
    assert callback.next_coefficient(0.1, -3.0) > 0.1, "a benchmark below 0 is a loss"


def test_the_capability_is_the_smallest_share_of_a_baseline() -> None:
    callback = AdaptivePTX(benchmarks=dict.fromkeys(("a", "b"), Falling()))
    callback.baseline = {"held_out_perplexity": 10.0, "benchmark/a": 0.5, "benchmark/b": 40.0}
    numbers = {"held_out_perplexity": 12.5, "benchmark/a": 0.45, "benchmark/b": 44.0}
    assert callback.capability(numbers) == pytest.approx(0.8)
    assert callback.capability(numbers | {"benchmark/a": 0.3}) == pytest.approx(0.6)
    assert math.isnan(callback.capability(numbers | {"held_out_perplexity": math.inf}))


# --- in a run --------------------------------------------------------------------------------------------------------


class Falling:
    """A benchmark that falls with every iteration, and uses what a probe may not change."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, module: Any) -> float:
        self.calls.append(module.control.iteration)
        assert not module.actor.training and not torch.is_grad_enabled()
        module.actor.lm.model.layers[0].train()
        torch.rand(3), random.random(), np.random.rand()
        return 1.0 - 0.05 * (module.control.iteration - 1)


def test_a_run_whose_capability_falls_doubles_gamma_and_says_why() -> None:
    benchmark, log, recorder = Falling(), DecisionLog(), Recorder()
    module = ptx_module()
    callback = AdaptivePTX(every=1, benchmarks={"falling": benchmark}, smoothing=0.0)
    trainer = fit(module, [callback, recorder], logger=log)
    assert benchmark.calls == [1, 2, 3, 4]
    assert module.control.value("ptx_coefficient") == pytest.approx(0.4)
    reasons = log.of("raise_ptx_coefficient")
    assert reasons[0] == (2, "0.950 of the capability left, tolerance 0.98: from 0.05 to 0.1") and len(reasons) == 3
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("ptx/")}
    assert metrics["ptx/coefficient"] == pytest.approx(0.4), "it acts in the iteration of the probe"
    assert metrics["ptx/benchmark/falling"] == metrics["ptx/capability"] == pytest.approx(0.85)
    assert metrics["ptx/capability_average"] == pytest.approx(0.85)
    assert metrics["ptx/held_out_perplexity"] > 1


class Knobs(Recorder):
    """The coefficient of the text in each iteration."""

    def on_update_end(self, trainer: Any, module: Any, stats: Any) -> None:
        self.events.append(("gamma", module.control.applied["ptx_coefficient"]))


def test_pid_acts_from_the_first_probe_after_the_baseline_on() -> None:
    """e = log(log(share) / log(0.98)) of shares 0.95, 0.9 and 0.85; gamma = 0.05 x exp(0.5 e + 0.1 sum(e))."""
    callback = AdaptivePTX(
        every=1, benchmarks={"falling": Falling()}, mode="pid", smoothing=0.0, kp=0.5, ki=0.1, kd=0.0
    )
    fit(ptx_module(ptx=PTX | {"held_out": 0}), [callback, knobs := Knobs()])
    errors = [math.log(math.log(share) / math.log(0.98)) for share in (0.95, 0.9, 0.85)]
    expected = [0.05, *(0.05 * math.exp(0.5 * e + 0.1 * sum(errors[: n + 1])) for n, e in enumerate(errors))]
    assert knobs.of("gamma")[0] == 0.05, "module.ptx.coefficient"
    assert knobs.of("gamma") == pytest.approx(expected, rel=1e-6)


def test_a_benchmark_that_raises_is_named_with_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In what the command prints, and in what it records for the supervisor."""

    def broken(module: Any) -> float:
        raise ValueError("boom")

    monkeypatch.setenv(files.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="boom") as caught, recorded():
        fit(ptx_module(), [AdaptivePTX(benchmarks={"broken": broken})])
    said = (in_short(caught.value) or "").splitlines()
    assert said[0] == "callbacks.adaptive_ptx.benchmarks.broken: ValueError: boom"
    assert said[-1].strip() == 'raise ValueError("boom")'
    record = files.read(tmp_path / files.END) or {}
    assert (record["class"], record["message"]) == ("user_code", "callbacks.adaptive_ptx.benchmarks.broken: boom")


def test_probes_change_nothing_of_the_run() -> None:
    """Modes, random generators and counters: with probes that move nothing the run equals one without, bit for bit."""
    states = []
    for callbacks in ([], [AdaptivePTX(every=1, benchmarks={"falling": Falling()}, tolerance=0.5)]):
        module = ptx_module()
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        fit(module, callbacks)
        modes = [part.training for part in module.modules()]
        numpy = np.random.get_state(legacy=False)["state"]["key"].tolist()
        generators = (torch.get_rng_state().tolist(), random.getstate(), numpy)
        states.append((weights(module), module.control.state_dict(), modes, generators, module._ptx.stream.position))
    (first, *rest), (second, *others) = states
    assert same(first, second) and rest == others


def test_probes_come_when_they_are_due_and_baselines_before_the_first_step() -> None:
    benchmark, module = Falling(), ptx_module(iterations=5)
    callback = AdaptivePTX(every=2, benchmarks={"falling": benchmark})
    fit(module, [callback])
    assert benchmark.calls == [1, 3, 5] and callback.baseline["benchmark/falling"] == 1.0
    fresh = ptx_module()
    fit(ptx_module(iterations=1), [probe := AdaptivePTX()])
    fresh.trainer = type("", (), {"precision_plugin": module.trainer.precision_plugin})()
    assert probe.baseline["held_out_perplexity"] == pytest.approx(math.exp(fresh.text_loss(fresh.held_out_text)))


@pytest.mark.parametrize("mode", ["doubling", "pid"])
def test_a_resumed_run_equals_the_whole_one(tmp_path: Path, mode: Any) -> None:
    settings: dict[str, Any] = {"every": 1, "mode": mode, "smoothing": 0.3, "window": 1}
    [callback] = resume_equals_whole(
        tmp_path, lambda: [AdaptivePTX(**settings, benchmarks={"falling": Falling()})], ptx_module
    )
    assert callback.baseline["benchmark/falling"] == 1.0 and callback.benchmarks["falling"].calls == [3, 4]


def test_another_held_out_text_gets_a_baseline_of_its_own() -> None:
    first, second = AdaptivePTX(), AdaptivePTX()
    first._held_out, second._held_out = torch.tensor([[1, 2]]), torch.tensor([[1, 3]])
    first.baseline, first.average = {"held_out_perplexity": 17.1, "benchmark/own": 0.5}, 0.2
    with pytest.warns(UserWarning, match="its baseline is measured again"):
        second.load_state_dict(first.state_dict())
    assert second.baseline == {"benchmark/own": 0.5} and second.average is None
    second._held_out = first._held_out.clone()
    second.load_state_dict(first.state_dict())
    assert second.baseline == first.baseline and second.average == 0.2


def test_a_text_of_its_own_takes_the_place_of_the_held_out_blocks(tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("12+34=46 " * 20)
    module = ptx_module(iterations=1, ptx=PTX | {"held_out": 0})
    callback = AdaptivePTX(text=str(tmp_path / "other.txt"), blocks=4)
    fit(module, [callback])
    blocks = module.read_text(str(tmp_path / "other.txt"), text_field="text", key="x")[:4]
    assert torch.equal(callback._held_out, blocks) and len(blocks) == 4
    with pytest.raises(InputError, match=r"callbacks\.adaptive_ptx has nothing to probe: set module\.ptx\.held_out"):
        fit(ptx_module(ptx=PTX | {"held_out": 0}), [AdaptivePTX()])
    with pytest.raises(ValueError, match=r"callbacks\.adaptive_ptx\.text = .*: .*no text in the column 'words'"):
        fit(ptx_module(), [AdaptivePTX(text=str(tmp_path / "other.txt"), text_field="words")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.txt", "", "the text has 0 tokens, fewer than one block"),
        ("short.txt", "12+3", "fewer than one block of module.ptx.length"),
        ("other.txt", "12+34=46 \u65e5 " * 20, "the model has no token for '\u65e5'"),
        ("rows.jsonl", '{"words": "1+1"}', "no text in the column 'text' (columns: words)"),
        ("table.csv", "text\n1+1", "is not a data file"),
        ("gone.txt", None, "there is no file"),
        (5, None, "5 is not a data source"),
    ],
)
def test_a_text_that_cannot_be_used_is_invalid_input(tmp_path: Path, name: Any, content: str | None, said: str) -> None:
    """An error of the user's input, so the command tells it on one screen and ends with 2."""
    path = tmp_path / str(name)
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        fit(ptx_module(), [AdaptivePTX(text=name if name == 5 else str(path))])
    given = name if name == 5 else str(path)
    assert str(caught.value).startswith(f"callbacks.adaptive_ptx.text = {given!r}: ") and said in str(caught.value)


def test_without_ptx_it_is_refused() -> None:
    with pytest.raises(InputError, match=r"callbacks\.adaptive_ptx steers module\.ptx, which is off"):
        fit(ptx_module(ptx=None), [AdaptivePTX()])


def test_a_start_outside_the_bounds_is_said_and_moved_inside() -> None:
    module = ptx_module(iterations=1)
    with pytest.warns(UserWarning, match=r"module\.ptx\.coefficient = 0\.05 lies outside .* starts at 0\.2"):
        fit(module, [AdaptivePTX(minimum=0.2)])
    assert module.control.value("ptx_coefficient") == 0.2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("high", r"benchmarks\.broken returned 'high'; allowed is a number"),
        (None, r"benchmarks\.broken returned None"),
        (0.0, r"the baseline of benchmark/broken is 0\.0, of which no share can be kept"),
        (math.nan, r"the baseline of benchmark/broken is nan"),
    ],
)
def test_a_benchmark_that_measures_nothing_ends_the_run_before_it_begins(value: Any, said: str) -> None:
    module = ptx_module()
    before = weights(module)
    with pytest.raises(InputError, match=rf"callbacks\.adaptive_ptx.*{said}"):
        fit(module, [AdaptivePTX(benchmarks={"broken": lambda module: value})])
    assert same(before, weights(module)) and module.control.update == 0


def test_a_probe_that_becomes_nan_is_warned_about_and_moves_nothing() -> None:
    module = ptx_module(iterations=2)
    benchmark = {"breaks": lambda module: 1.0 if module.control.iteration == 1 else math.nan}
    with pytest.warns(UserWarning, match=r"iteration 2: a probe of callbacks\.adaptive_ptx is not finite"):
        trainer = fit(module, [AdaptivePTX(every=1, benchmarks=benchmark, smoothing=0.0)])
    assert module.control.value("ptx_coefficient") == 0.05
    assert "ptx/capability" not in trainer.callback_metrics and "ptx/benchmark/breaks" not in trainer.callback_metrics


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"every": 0}, r"every = 0 is not allowed: a whole number >= 1"),
        ({"blocks": 0}, r"blocks = 0 is not allowed"),
        ({"window": 0.5}, r"window = 0\.5 is not allowed: a whole number"),
        ({"tolerance": 1.0}, r"tolerance = 1\.0 is not allowed: a finite number > 0 and < 1"),
        ({"smoothing": 1.0}, r"smoothing = 1\.0 is not allowed"),
        ({"min_improvement": -1}, r"min_improvement = -1 is not allowed"),
        ({"ki": -1}, r"ki = -1 is not allowed"),
        ({"mode": "proportional"}, r"mode = 'proportional' is not allowed: one of doubling, pid"),
        ({"minimum": 0}, r"minimum = 0 is not allowed: a finite number > 0"),
        ({"minimum": 2, "maximum": 1}, r"minimum = 2 .*: it must be below callbacks\.adaptive_ptx\.maximum = 1"),
        ({"benchmarks": {"a": 3}}, r"benchmarks\.a = 3 is not allowed: a callable that takes the module"),
        ({"benchmarks": [3]}, r"benchmarks = \[3\] is not allowed: callables by name"),
        ({"benchmarks": {"a/b": float}}, r"benchmarks = 'a/b' is not allowed: names of letters"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingError, match=rf"callbacks\.adaptive_ptx\.{said}"):
        AdaptivePTX(**settings)


def test_two_owners_of_the_knob_are_refused() -> None:
    control = Control()
    control.register("ptx_coefficient", 0.05)
    control.own("ptx_coefficient", "Other")
    module: Any = type("", (), {"control": control, "held_out_text": torch.zeros(2, 2)})()
    with pytest.raises(ValueError, match="already belongs to Other; AdaptivePTX cannot own it"):
        AdaptivePTX().setup(NOTHING, module, "fit")


def test_the_documented_benchmark_runs_as_it_stands() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "ptx.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "ptx.md", "exec"), names)
    module = ptx_module(iterations=3)
    trainer = fit(module, [callback := AdaptivePTX(benchmarks={"short": names["short_answers"]})])
    assert 0.0099 < float(trainer.callback_metrics["ptx/benchmark/short"]) < 1.0101
    assert set(callback.baseline) == {"held_out_perplexity", "benchmark/short"}


def forgetting(callbacks: list[Any], ptx: dict[str, Any] | None) -> tuple[float, float]:
    """Rise of the perplexity on text that was learned before PPO, and the last mean reward."""
    policy = tiny_policy()
    blocks = text_blocks(TEXT, policy.tokenizer, text_field="text", length=16, key="text").long()
    optimizer = torch.optim.AdamW(policy.actor.parameters(), lr=5e-3)
    for _ in range(80):
        policy.actor.lm(input_ids=blocks, labels=blocks).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def loss() -> float:
        return float(policy.actor.lm(input_ids=blocks, labels=blocks).loss.detach())

    before, recorder = loss(), Recorder()
    fit(tiny_module(policy=policy, iterations=40, ptx=ptx, actor={"lr": 2e-3}), [*callbacks, recorder])
    scores = [stats.score_mean for _, stats in recorder.of("on_experience_ready")]
    return math.exp(loss() - before) - 1, sum(scores[-5:]) / 5


@pytest.mark.slow
def test_ppo_forgets_a_text_and_keeps_it_with_adaptive_ptx() -> None:
    """The reward rises later: a model of this size pays for what it keeps. benchmarks/ptx.py has a larger one."""
    risen, reward = forgetting([], None)
    kept, other = forgetting([AdaptivePTX(every=1, smoothing=0.0)], PTX | {"tokens_per_step": 128})
    assert risen >= 0.2 and kept <= 0.05 and other >= 0.9 * reward, (risen, kept, reward, other)
