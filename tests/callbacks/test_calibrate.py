"""The probe of Calibrate: exact numbers, runs that continue or must end, and no effect on the run."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_rlhf.callbacks import Calibrate, CalibrationError
from lightning_rlhf.callbacks.calibrate import compare, pearson
from lightning_rlhf.control import Control
from lightning_rlhf.rollout import HFEngine
from tests.support import Recorder, fit, same, tiny_module, weights


class RawEngine(HFEngine):
    """Reports log-probabilities before temperature, as engines do by default (a fake of that mode)."""

    def generate(self, prompts, **request):
        rollout = super().generate(prompts, **request)
        raw = self._require_setup()[0].lm(input_ids=rollout.concatenated()[0], attention_mask=rollout.concatenated()[1])
        first = rollout.prompt_ids.shape[1] - 1
        logprobs = raw.logits[:, first:-1].detach().log_softmax(-1).gather(-1, rollout.response_ids.unsqueeze(-1))
        rollout.rollout_logprobs = logprobs.squeeze(-1).where(rollout.response_mask, 0.0)
        return rollout


class StaleEngine(HFEngine):
    """Keeps the weights it was set up with (a fake of an engine whose transfer is switched off)."""

    def update_weights(self, version: int) -> None:
        self.policy_version = version


def test_numbers_worked_out_by_hand() -> None:
    train = torch.tensor([[0.5, 0.25, 0.9]]).log()
    rollout = torch.tensor([[0.4, 0.30, 0.1]]).log()
    numbers = compare(train, rollout, torch.tensor([[True, True, False]]))
    gaps = [math.log(0.5 / 0.4), math.log(0.30 / 0.25)]
    assert numbers["calibrate/logprob_abs_diff_mean"] == pytest.approx(sum(gaps) / 2, rel=1e-6)
    assert numbers["calibrate/logprob_abs_diff_max"] == pytest.approx(max(gaps), rel=1e-6)
    k3 = [0.5 / 0.4 - 1 - math.log(0.5 / 0.4), 0.25 / 0.3 - 1 - math.log(0.25 / 0.3)]
    assert numbers["calibrate/k3_kl"] == pytest.approx(sum(k3) / 2, rel=1e-5)
    assert numbers["calibrate/probs_diff_mean"] == pytest.approx(0.075, rel=1e-5)
    assert numbers["calibrate/probs_diff_max"] == pytest.approx(0.1, rel=1e-5)
    assert numbers["calibrate/probs_diff_std"] == pytest.approx(0.05 / math.sqrt(2), rel=1e-5)
    assert numbers["calibrate/probs_pearson_corr"] == pytest.approx(1.0)  # two points lie on a line


def test_a_probe_without_a_token_measures_nothing_and_the_next_iteration_probes_again() -> None:
    """It must not be reported as an engine without log-probabilities, nor with a correlation of 1."""
    probes = iter([([[False, False]], 0.0), ([[True, False]], 1e-4), ([[True, False]], 1.0)])

    def probe(prompts: object, *, max_new_tokens: int) -> tuple[SimpleNamespace, torch.Tensor]:
        mask, gap = next(probes)
        engine = torch.full((1, 2), -1.0)
        return SimpleNamespace(rollout_logprobs=engine, response_mask=torch.tensor(mask)), engine + gap

    actor = torch.nn.Linear(1, 1)
    engine = SimpleNamespace(sampling=SimpleNamespace(truncated=False, temperature=1.0), describe=dict)
    trainer = SimpleNamespace(precision="32-true")
    module: Any = SimpleNamespace(control=Control(), probe=probe, engine=engine, actor=actor, trainer=trainer)
    prompts: Any = SimpleNamespace(first=lambda count: None)
    callback, nothing = Calibrate(every=100), cast(Any, None)
    measured = []
    for iteration in (1, 2, 3):
        module.control.begin_iteration(iteration)
        callback.on_rollout_start(nothing, module, prompts)
        measured.append(callback._first)
    assert measured == [True, False, False] and module.control.reported == {}, "the third iteration has no probe"
    callback._first = True
    with pytest.raises(CalibrationError, match=r"is 1 nats, over the limit of 0\.001"):
        callback.on_rollout_start(nothing, module, prompts)


def test_the_gap_is_said_at_the_first_probe_and_when_it_is_larger_than_twice_the_largest(caplog) -> None:
    engine = SimpleNamespace(sampling=SimpleNamespace(truncated=False, temperature=1.0), describe=dict)
    gaps = iter((1e-3, 1.5e-3, 5e-3, 6e-3))

    def probe(prompts: object, *, max_new_tokens: int) -> tuple[SimpleNamespace, torch.Tensor]:
        logprobs = torch.full((1, 2), -1.0, dtype=torch.float64)
        mask = torch.tensor([[True, True]])
        return SimpleNamespace(rollout_logprobs=logprobs, response_mask=mask), logprobs + next(gaps)

    module: Any = SimpleNamespace(control=Control(), probe=probe, engine=engine)
    module.actor, module.trainer = torch.nn.Linear(1, 1), SimpleNamespace(precision="32-true")
    callback, prompts = Calibrate(every=1, limit=1.0), cast(Any, SimpleNamespace(first=lambda count: None))
    with caplog.at_level("INFO"):
        for iteration in range(1, 5):
            module.control.begin_iteration(iteration)
            callback.on_rollout_start(cast(Any, None), module, prompts)
    assert [record.getMessage() for record in caplog.records if "engine and trainer" in record.getMessage()] == [
        "calibrate, iteration 1 (first probe): engine and trainer differ by\n"
        "  0.001 nats per token at equal weights (largest 0.001; k3 5e-07)",
        "calibrate, iteration 3 (largest gap so far): engine and trainer differ by\n"
        "  0.005 nats per token at equal weights (largest 0.005; k3 1.3e-05)",
    ]


def test_the_largest_gap_is_kept_and_a_probe_that_is_not_scheduled_leaves_it(caplog) -> None:
    callback = Calibrate(every=20)
    callback.load_state_dict({"largest": 1e-3})
    module = cast(Any, SimpleNamespace(control=Control()))
    module.control.begin_iteration(3)
    numbers = {f"calibrate/{name}": 5e-3 for name in ("logprob_abs_diff_mean", "logprob_abs_diff_max", "k3_kl")}
    with caplog.at_level("INFO"):
        callback._say(numbers, module, scheduled=False)
    assert "iteration 3 (largest gap so far)" in caplog.text and callback.state_dict() == {"largest": 1e-3}
    callback._say(numbers, module, scheduled=True)
    assert callback.state_dict() == {"largest": 5e-3}


def test_pearson_against_torch() -> None:
    x, y = torch.rand(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    every = torch.ones(50, dtype=torch.bool)
    assert pearson(x, y, every) == pytest.approx(torch.corrcoef(torch.stack([x, y]))[0, 1].item(), abs=1e-12)
    assert pearson(x, x, every) == 1.0
    assert pearson(torch.ones(50), y, every) == 0.0


def test_the_embedded_engine_agrees_at_every_probe() -> None:
    reported: dict[int, dict[str, float]] = {}

    class Watch(Recorder):
        def on_experience_ready(self, trainer, module, experience, stats):
            reported[stats.iteration] = dict(module.control.reported)

    fit(tiny_module(iterations=4, temperature=0.7), [Calibrate(every=2), Watch()])
    assert [n for n, values in reported.items() if "calibrate/logprob_abs_diff_max" in values] == [1, 3]
    assert max(values.get("calibrate/logprob_abs_diff_max", 0.0) for values in reported.values()) <= 1e-5


def test_a_run_with_probes_equals_one_without() -> None:
    plain, probed = tiny_module(iterations=3), tiny_module(iterations=3)
    state = torch.get_rng_state()
    fit(plain)
    torch.set_rng_state(state)
    fit(probed, [Calibrate(every=1)])
    assert same(weights(plain), weights(probed))
    assert (plain.control.iteration, plain.control.update) == (probed.control.iteration, probed.control.update)


def test_log_probabilities_before_temperature_are_refused_before_the_first_rollout() -> None:
    module, recorder = tiny_module(iterations=1), Recorder()
    module.engine = RawEngine(samples=2, max_new_tokens=6, temperature=0.5)
    with pytest.raises(CalibrationError, match=r"iteration 1: .* temperature there \(here it is 0\.5\)"):
        fit(module, [Calibrate(), recorder])
    assert recorder.of("on_rollout_end") == []


def test_raw_mode_does_not_matter_at_temperature_one() -> None:
    module = tiny_module(iterations=1)
    module.engine = RawEngine(samples=2, max_new_tokens=6)
    gap = fit(module, [Calibrate()]).callback_metrics["calibrate/logprob_abs_diff_mean"]
    assert 0 < gap < 1e-5, "measured, and rounding"


def test_stale_weights_end_the_run_at_the_next_probe() -> None:
    module = tiny_module(iterations=4, actor={"lr": 1e-2})
    module.engine = StaleEngine(samples=2, max_new_tokens=6, lag=1)  # a copy of the weights, as other engines have
    with pytest.raises(CalibrationError, match=r"iteration 2: .*weights that were not sent"):
        fit(module, [Calibrate(every=1)])


def test_truncated_sampling_is_reported_and_not_judged(caplog: pytest.LogCaptureFixture) -> None:
    module = tiny_module(iterations=2)
    module.engine = HFEngine(samples=2, max_new_tokens=6, top_k=3)
    fit(module, [Calibrate(every=1)])
    assert [r.message for r in caplog.records if "calibrate only reports" in r.message and "top_k = 3" in r.message]
    module = tiny_module(iterations=2)
    module.engine = HFEngine(samples=2, max_new_tokens=6, top_k=3)
    with pytest.raises(CalibrationError, match=r"over the limit of 0\.001"):
        fit(module, [Calibrate(limit=1e-3)])


def test_an_engine_without_a_log_probability_ends_the_run_before_anything_is_compared() -> None:
    class NanEngine(HFEngine):
        def generate(self, prompts, **request):
            rollout = super().generate(prompts, **request)
            rollout.rollout_logprobs[0, 0] = math.nan
            return rollout

    module = tiny_module(iterations=1)
    module.engine = NanEngine(samples=2, max_new_tokens=6)
    with pytest.raises(FloatingPointError, match="response token 0"):
        fit(module, [Calibrate()])


@pytest.mark.parametrize(
    ("precision", "described", "kind"),
    [
        ("32-true", {}, "float32"),
        ("32-true", {"dtype": "bfloat16"}, "low precision"),
        ("bf16-mixed", {}, "low precision"),
        ("32-true", {"weight_bits": 8}, "rounded weights"),
        ("32-true", {"quantization": "fp8"}, "rounded weights"),
    ],
)
def test_the_limit_follows_the_coarser_side(monkeypatch: pytest.MonkeyPatch, precision, described, kind) -> None:
    seen = []

    class Watch(Recorder):
        def on_rollout_end(self, trainer, module, rollout):
            from lightning_rlhf.callbacks.calibrate import coarsest

            seen.append(coarsest(module))

    own = HFEngine.describe
    monkeypatch.setattr(HFEngine, "describe", lambda self: own(self) | described)
    fit(tiny_module(iterations=1), [Watch()], precision=precision)
    assert seen == [kind]


@pytest.mark.parametrize("setting", [{"prompts": 0}, {"tokens": 1.5}, {"every": True}, {"limit": 0.0}])
def test_settings_are_checked(setting) -> None:
    [name] = setting
    with pytest.raises(ValueError, match=rf"callbacks\.calibrate\.{name} = "):
        Calibrate(**setting)
