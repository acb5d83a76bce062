"""KLGuard: a larger coefficient first, then the step skipped and the actor restored; the penalty of single tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import KLGuard
from lightning_rlhf.models import Policy
from tests.support import (
    FAST,
    DecisionLog,
    Recorder,
    fit,
    part_of,
    resume_equals_whole,
    same,
    tiny_module,
    tiny_policy,
)

K3: dict[str, Any] = {"kl": {"estimator": "k3", "coefficient": 0.1}}


def away_from_reference(amount: float = 0.05, **policy: Any) -> Policy:
    """A policy whose actor differs from the reference."""
    built = tiny_policy(**policy)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in built.actor.parameters():
            parameter.add_(amount * torch.randn(parameter.shape, generator=generator))
    return built


# --- hard ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_over_the_hard_limit_the_step_is_skipped_and_the_actor_as_before_the_update(estimator: str) -> None:
    """Step 1 goes too far, which is seen before step 2: that one is skipped, the first undone; the critic keeps it.

    Also where the penalty is k1, which is negative on the tokens that the policy has left behind.
    """
    settings = {**FAST, "kl": {"estimator": estimator, "coefficient": 0.1}}
    module, recorder, log = tiny_module(iterations=1, **settings), Recorder(), DecisionLog()
    actor, critic = part_of(module, "actor"), part_of(module, "critic")
    trainer = fit(module, [KLGuard(target=1e-4, token_limit=None), recorder], logger=log)
    assert [stats.stepped for stats in recorder.of("on_minibatch_end")] == [True, False]
    assert same(actor, part_of(module, "actor")) and not same(critic, part_of(module, "critic"))
    metrics = trainer.callback_metrics
    assert metrics["stability/rollbacks"] == 1 and metrics["stability/steps_skipped"] == 1
    [(_, reason)] = log.of("rollback")
    assert reason.startswith("kl/ref ") and "over 3.0 x 0.0001 in epoch 0, minibatch 1" in reason


def test_without_restore_it_only_ends_the_epochs_and_keeps_no_copy() -> None:
    module, guard = tiny_module(iterations=1, **FAST, **K3), KLGuard(target=1e-4, token_limit=None, restore=False)
    actor = part_of(module, "actor")
    trainer = fit(module, [guard])
    assert not guard.rollback_scopes and module._update_loop.state_dict() == {"actor": None}
    assert not same(actor, part_of(module, "actor")) and trainer.callback_metrics["stability/steps_skipped"] == 1


def test_a_last_step_that_went_too_far_is_undone_when_the_next_samples_show_it() -> None:
    """One minibatch per iteration: no forward pass follows its step, only the samples of the next iteration."""
    module, recorder = (
        tiny_module(iterations=2, actor=FAST["actor"], update={"epochs": 1, "minibatch_size": 16}, **K3),
        Recorder(),
    )
    actor = part_of(module, "actor")
    fit(module, [KLGuard(target=1e-4, token_limit=None), recorder])
    assert [stats.steps for stats in recorder.of("on_update_end")] == [1, 0]
    assert same(actor, part_of(module, "actor"))


def test_a_run_that_begins_over_the_limit_can_come_back() -> None:
    recorder = Recorder()
    module = tiny_module(policy=away_from_reference(), iterations=2, **K3)
    trainer = fit(module, [KLGuard(target=1e-4, token_limit=None), recorder])
    assert all(stats.steps == 4 for stats in recorder.of("on_update_end"))
    assert trainer.callback_metrics["stability/rollbacks"] == 0
    assert trainer.callback_metrics["stability/kl_coefficient_multiplier"] == 2.0, "the soft stage acts"


# --- soft ------------------------------------------------------------------------------------------------------------


def test_the_coefficient_grows_to_its_bound_and_shrinks_again() -> None:
    """kl/ref stays between the limits until the target is raised; coefficient 0.1 times 1, 2, 4, 4, then 2, then 1."""
    log, seen = DecisionLog(), []

    class Watched(KLGuard):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
            seen.append(module.control.value("kl_coefficient"))
            self.target = 1e-6 if stats.iteration < 4 else 1e6
            super().on_experience_ready(trainer, module, experience, stats)

    module = tiny_module(policy=away_from_reference(), iterations=6, **K3)
    fit(module, [Watched(target=1e-6, hard=1e9, max_multiplier=4.0, token_limit=None)], logger=log)
    assert seen == pytest.approx([0.1, 0.2, 0.4, 0.4, 0.2, 0.1])
    assert [iteration for iteration, _ in log.of("raise_kl_coefficient")] == [1, 2]
    assert "over 1.5 x 1e-06: times 2, less with every calm iteration" in log.of("raise_kl_coefficient")[0][1]


def test_it_acts_in_the_first_iterations_only() -> None:
    guard = KLGuard(target=1e-6, hard=1e9, token_limit=0.5, iterations=2)
    recorder = Recorder()
    module = tiny_module(policy=away_from_reference(), iterations=4, **K3)
    fit(module, [guard, recorder])
    overridden = [e.reward_override is not None for e, _ in recorder.of("on_experience_ready")]
    assert overridden == [True, True, False, False]
    assert not guard.rollback_scopes and module._update_loop.state_dict() == {"actor": None}


# --- tokens ----------------------------------------------------------------------------------------------------------


def experience_of(*callbacks: Any) -> Any:
    """With gamma 0 and no whitening, the advantage of a token is its reward."""
    module = tiny_module(
        policy=away_from_reference(critic="none"),
        iterations=1,
        advantage={"estimator": "reinforce_plus_plus", "gamma": 0.0, "whiten": False},
        reward_processing={"normalise": "batch"},
        kl={"coefficient": 0.1},
    )
    recorder = Recorder()
    trainer = fit(module, [*callbacks, recorder])
    return recorder.of("on_experience_ready")[0][0], trainer.callback_metrics


def test_tokens_over_their_limit_get_the_penalty_and_the_scores_statistics_do_not_see_it() -> None:
    plain, _ = experience_of()
    guarded, metrics = experience_of(KLGuard(hard=1e9, token_limit=0.1, token_penalty=-7.0))
    over = (guarded.old_logprobs - guarded.ref_logprobs > 0.1) & guarded.response_mask
    assert 0 < int(over.sum()) < int(guarded.response_mask.sum())
    assert torch.equal(guarded.advantages[over], torch.full_like(guarded.advantages[over], -7.0))
    assert torch.equal(guarded.advantages[~over], plain.advantages[~over])
    assert torch.equal(guarded.rewards, plain.rewards), "normalised before"
    share = over.sum() / guarded.response_mask.sum()
    assert float(metrics["reward/overridden_fraction"]) == pytest.approx(float(share))


# --- state and settings ----------------------------------------------------------------------------------------------


def test_state_and_the_copy_of_the_actor_survive_a_resume(tmp_path: Path) -> None:
    """Iteration 3 begins by undoing iteration 2's update, from the copy in the checkpoint."""

    class Late(KLGuard):
        def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
            self.target = 1e-9 if stats.iteration == 3 else 0.5
            super().on_experience_ready(trainer, module, experience, stats)

    [guard] = resume_equals_whole(
        tmp_path, lambda: [Late(token_limit=None)], lambda: tiny_module(iterations=4, actor={"lr": 3e-3}, **K3)
    )
    saved = torch.load(tmp_path / "iteration_000004.ckpt", weights_only=True)["lightning_rlhf"]
    assert saved["control"]["counts"]["rollbacks"] == 1 and saved["update"]["actor"] is not None
    assert guard.state_dict()["calm"] is True


def test_without_a_reference_it_is_refused() -> None:
    module = tiny_module(policy=tiny_policy(reference="none"), iterations=1)
    with pytest.raises(ValueError, match=r"callbacks.kl_guard watches the KL .* callbacks.kl_guard=null"):
        fit(module, [KLGuard(target=0.1)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": 0}, r"target = 0 is not allowed: a finite number > 0"),
        ({"soft": 4.0}, r"soft = 4.0 is not allowed: at most callbacks.kl_guard.hard = 3.0"),
        ({"factor": 1.0}, r"factor = 1.0 is not allowed: a finite number > 1"),
        ({"max_multiplier": 0.5}, r"max_multiplier = 0.5 is not allowed"),
        ({"token_limit": -0.5}, r"token_limit = -0.5 is not allowed: a finite number > 0, or null"),
        ({"token_penalty": 10.0}, r"token_penalty = 10.0 is not allowed: a finite number <= 0"),
        ({"jump": 0}, r"jump = 0 is not allowed: a finite number > 0, or null"),
        ({"fall": 0}, r"fall = 0 is not allowed: a finite number > 0"),
        ({"iterations": 0}, r"iterations = 0 is not allowed: a whole number >= 1, or null"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"callbacks.kl_guard.{message}"):
        KLGuard(**settings)
