"""AdaptiveKL: three controllers of the KL coefficient, on simulated plants and a real run."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf.callbacks import AdaptiveKL
from tests.support import fit, resume_equals_whole, tiny_module, tiny_policy


def test_the_coefficient_follows_the_kl_once_per_iteration() -> None:
    """Below the target the error is clipped at -0.2: beta x (1 - 0.2 x 16 sequences / horizon 160) per iteration."""
    module = tiny_module(iterations=2, actor={"lr": 1e-6}, kl={"coefficient": 0.1})
    fit(module, [AdaptiveKL(target=5.0, mode="proportional", horizon=160)])
    assert module.control.value("kl_coefficient") == pytest.approx(0.1 * 0.98 * 0.98)


def test_two_owners_of_one_knob_are_refused() -> None:
    class Other(AdaptiveKL):
        pass

    with pytest.raises(ValueError, match="already belongs to AdaptiveKL; Other cannot own it"):
        fit(tiny_module(iterations=1), [AdaptiveKL(), Other()])


@pytest.mark.parametrize(("name", "value"), [("target", 0), ("target", -1), ("horizon", 0)])
def test_a_controller_without_target_or_horizon_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"callbacks.adaptive_kl.{name} = {value}"):
        AdaptiveKL(**{name: value})


class Plant:
    """A KL that responds to the coefficient: inversely proportional, with lag; readings are noisy."""

    def __init__(self, strength: float, *, lag: float = 0.3, noise: float = 0.1, seed: int = 0) -> None:
        self.strength, self.lag, self.noise, self.random = strength, lag, noise, random.Random(seed)
        self.kl: float | None = None

    def respond(self, beta: float) -> float:
        settled = self.strength / beta
        self.kl = settled if self.kl is None else self.kl + self.lag * (settled - self.kl)
        return self.kl * (1 + self.noise * self.random.gauss(0, 1))


def settle(controller: AdaptiveKL, plant: Plant, beta: float, iterations: int) -> tuple[list[float], list[float]]:
    """The true KL and the coefficient after each iteration."""
    kls, betas = [], []
    for _ in range(iterations):
        beta = controller.next_coefficient(beta, plant.respond(beta), 64)
        kls.append(plant.kl or 0.0)
        betas.append(beta)
    return kls, betas


TARGET = 0.05


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("beta", "factor"), [(0.02, 10.0), (0.4, 0.1)])
def test_pid_settles_within_50_iterations_from_ten_times_too_high_and_too_low(
    beta: float, factor: float, seed: int
) -> None:
    plant = Plant(strength=factor * TARGET * beta, seed=seed)
    kls, _ = settle(AdaptiveKL(TARGET), plant, beta, 80)
    assert kls[0] == pytest.approx(factor * TARGET), "where it starts"
    assert all(abs(kl / TARGET - 1) < 0.1 for kl in kls[50:])


@pytest.mark.parametrize(("pushed", "bound"), [(1e3, 0.5), (1e-3, 0.01)])
def test_pid_does_not_wind_up_in_200_saturated_iterations(pushed: float, bound: float) -> None:
    """The plant cannot reach the target for 200 iterations; from then on it can, with beta 0.07."""
    controller, plant = AdaptiveKL(TARGET), Plant(strength=pushed * TARGET * 0.07, noise=0.0)
    _, betas = settle(controller, plant, 0.07, 200)
    assert betas[-1] == pytest.approx(bound)
    plant.strength = TARGET * 0.07
    kls, betas = settle(controller, plant, betas[-1], 50)
    assert betas[-1] == pytest.approx(0.07, rel=0.1) and kls[-1] == pytest.approx(TARGET, rel=0.1)


def test_a_kl_rising_from_0_is_not_integrated_and_one_that_stays_low_is() -> None:
    rising = AdaptiveKL(TARGET, kp=0.0, kd=0.0, smoothing=0.0)
    beta = 0.1
    for kl in (0.0, 0.01, 0.02, 0.03, 0.04):
        beta = rising.next_coefficient(beta, kl, 64)
    assert beta == pytest.approx(0.1)
    assert rising.next_coefficient(beta, 0.04, 64) < 0.1


def test_one_step_of_pid_by_hand() -> None:
    """e = log 2: log(beta / 0.1) = 0.5 e + 0.1 e; then the average is 0.5 x 0.1 + 0.5 x 0.05 = 0.075, e' = log 1.5."""
    controller = AdaptiveKL(TARGET, kp=0.5, ki=0.1, kd=0.2, smoothing=0.5)
    first = controller.next_coefficient(0.1, 0.1, 64)
    assert first == pytest.approx(0.1 * 2**0.6)
    second = controller.next_coefficient(first, 0.05, 64)
    e, before = math.log(1.5), math.log(2)
    assert second == pytest.approx(0.1 * math.exp(0.5 * e + 0.1 * (before + e) + 0.2 * (e - before)))


@pytest.mark.parametrize("mode", ["pid", "doubling", "proportional"])
def test_readings_that_are_no_number_change_nothing_and_negative_ones_lower_the_coefficient(mode: Any) -> None:
    controller = AdaptiveKL(TARGET, mode=mode, smoothing=0.0)
    assert controller.next_coefficient(0.1, math.nan, 64) == 0.1
    assert 0.01 <= controller.next_coefficient(0.1, -0.3, 64) < 0.1


def test_doubling_acts_once_per_reading_and_stays_in_its_bounds() -> None:
    """Smoothing 0.5 waits two iterations; the average starts anew, so one high reading acts once."""
    controller = AdaptiveKL(TARGET, mode="doubling", smoothing=0.5)
    betas, beta = [], 0.1
    for kl in (0.2, 0.2, 0.05, 0.05, 0.01, 0.01, 0.01, 0.01):
        beta = controller.next_coefficient(beta, kl, 64)
        betas.append(beta)
    assert betas == [0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
    for _ in range(100):
        beta = controller.next_coefficient(beta, 9.0, 64)
    assert beta == 0.5


@pytest.mark.parametrize(("smoothing", "wait"), [(0.0, 1), (0.5, 2), (0.8, 5), (0.9, 10), (0.99, 100)])
def test_doubling_waits_for_a_full_window(smoothing: float, wait: int) -> None:
    """1 / (1 - 0.8) is a little over 5 in floating point."""
    controller = AdaptiveKL(0.01, mode="doubling", smoothing=smoothing, minimum=1e-6, maximum=1e6)
    betas = [1.0]
    for _ in range(2 * wait):
        betas.append(controller.next_coefficient(betas[-1], 1.0, 64))
    assert [i for i in range(1, len(betas)) if betas[i] != betas[i - 1]] == [wait, 2 * wait]


@pytest.mark.parametrize("reading", [1e-4, 0.0, -1e-4, -1e-2])
def test_a_reading_that_stays_far_too_low_lowers_the_coefficient_to_its_bound(reading: float) -> None:
    """Also one below 0, of which a share more is less."""
    controller, beta = AdaptiveKL(TARGET), 0.1
    for _ in range(300):
        beta = controller.next_coefficient(beta, reading, 64)
    assert beta == pytest.approx(controller.minimum)


@pytest.mark.parametrize(("kl", "expected"), [(12.0, 0.100512), (3.0, 0.099488), (6.6, 0.100256), (6.0, 0.1)])
def test_the_proportional_controller_by_hand(kl: float, expected: float) -> None:
    controller = AdaptiveKL(6.0, mode="proportional", horizon=10_000)
    assert controller.next_coefficient(0.1, kl, 256) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "bang"}, r"mode = 'bang' is not allowed: one of pid, doubling, proportional"),
        ({"minimum": 0.5, "maximum": 0.1}, r"minimum = 0.5 .*: it must be below callbacks.adaptive_kl.maximum = 0.1"),
        ({"minimum": 0}, r"minimum = 0 is not allowed: a finite number > 0"),
        ({"smoothing": 1.0}, r"smoothing = 1.0 is not allowed"),
        ({"kp": -1}, r"kp = -1 is not allowed"),
        ({"figure_every": 0}, r"figure_every = 0 is not allowed: a whole number >= 1, or null"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"callbacks.adaptive_kl.{message}"):
        AdaptiveKL(**settings)


def test_a_start_outside_the_bounds_is_said_and_moved_inside() -> None:
    module = tiny_module(iterations=1, kl={"coefficient": 0.002})
    with pytest.warns(UserWarning, match=r"module.kl.coefficient = 0.002 lies outside .* starts at 0.01"):
        trainer = fit(module, [AdaptiveKL(figure_every=None)])
    assert trainer.callback_metrics["kl/coefficient"] == pytest.approx(0.01)


def test_without_a_reference_it_is_refused() -> None:
    module = tiny_module(policy=tiny_policy(reference="none"), iterations=1)
    with pytest.raises(ValueError, match=r"callbacks.adaptive_kl watches the KL .*model.policy.reference=copy"):
        fit(module, [AdaptiveKL()])


def test_a_real_run_raises_the_coefficient_draws_it_and_survives_a_resume(tmp_path: Path) -> None:
    """Large steps bring the KL over a small target, so beta rises; it is drawn, and a resume changes nothing."""
    blocks: dict[str, Any] = {"kl": {"coefficient": 0.05}, "actor": {"lr": 1e-2}}
    [controller] = resume_equals_whole(
        tmp_path, lambda: [AdaptiveKL(target=1e-3)], lambda: tiny_module(iterations=4, **blocks)
    )
    betas = [beta for _, _, beta in controller.history]
    assert [row[0] for row in controller.history] == [1, 2, 3, 4] and betas[0] == 0.05 and betas[3] > betas[0]
    assert (tmp_path / "figures" / "adaptive_kl.png").read_bytes().startswith(b"\x89PNG")
