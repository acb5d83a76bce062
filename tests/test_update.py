"""The update loop: order of epochs and minibatches, clocks, every verb of control, clipping, steps that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from lightning import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.experience import Experience
from lightning_rlhf.gradients import clip_gradients, gradient_norms
from lightning_rlhf.logbook import _more
from lightning_rlhf.minibatches import MinibatchPlan
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.snapshot import Snapshot
from tests.support import Recorder, fit, same, tiny_module, tiny_policy, weights


class Caller(RLHFCallback):
    """Calls ``act(module, stats)`` at every ``event``; ``scopes`` are its ``rollback_scopes``."""

    def __init__(self, event: str, act: Any, scopes: tuple[str, ...] = ()) -> None:
        setattr(self, event, lambda trainer, module, *args: act(module, *args))
        self.rollback_scopes = frozenset(scopes)  # type: ignore[arg-type]


# --- order and clocks --------------------------------------------------------------------------------------------


def test_each_epoch_is_a_new_permutation_and_sees_each_sample_once() -> None:
    """8 samples, minibatches of 2, 3 epochs: 3 runs of 8, each a permutation, not all the same."""
    recorder = Recorder()
    module = tiny_module(iterations=1, samples=1, update={"epochs": 3, "minibatch_size": 2})
    fit(module, [recorder])
    seen = [seed for minibatch in recorder.of("on_minibatch_start") for seed in minibatch.seed.tolist()]
    runs = [seen[0:8], seen[8:16], seen[16:24]]
    assert len(seen) == 24 and all(sorted(run) == sorted(set(seen)) and len(set(run)) == 8 for run in runs)
    assert len({tuple(run) for run in runs}) > 1


def test_permutations_depend_on_seed_iteration_and_epoch_alone(experience: Experience) -> None:
    def order(seed: int, iteration: int, epoch: int) -> list[int]:
        return [row for rows, *_ in MinibatchPlan(experience, 3, seed, iteration).epoch(epoch) for row in rows.tolist()]

    assert order(1, 1, 0) == order(1, 1, 0)
    assert len({tuple(order(*key)) for key in [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1)]}) == 4


def test_events_come_in_order_and_both_clocks_count() -> None:
    recorder = Recorder()
    module = tiny_module(iterations=2)
    trainer = fit(module, [recorder])
    step = ["on_minibatch_start", "on_before_step", "on_minibatch_end"]
    epoch = ["on_ppo_epoch_start", *step, *step, "on_ppo_epoch_end"]
    iteration = ["on_rollout_start", "on_rollout_end", "on_experience_ready", *epoch, *epoch, "on_update_end"]
    assert [event for event, _ in recorder.events] == iteration * 2
    assert (module.control.iteration, module.control.update, trainer.global_step) == (2, 8, 8)
    metrics = trainer.callback_metrics
    assert metrics["clock/iteration"] == 2 and metrics["clock/update"] == 8
    updates = [stats.update for stats in recorder.of("on_minibatch_end")]
    assert updates == list(range(8)), "own count of updates before each step"


def test_the_run_ends_after_exactly_the_iterations_asked_for_whatever_the_updates() -> None:
    stopper = Caller("on_ppo_epoch_end", lambda module, stats: module.control.stop_epochs("one is enough"))
    recorder = Recorder()
    module = tiny_module(iterations=3)
    trainer = fit(module, [stopper, recorder])
    assert [stats.epochs_used for stats in recorder.of("on_update_end")] == [1, 1, 1]
    assert (module.control.iteration, module.control.update, trainer.global_step) == (3, 6, 6)
    assert trainer.callback_metrics["stability/epochs_stopped"] == 3


def test_learning_rates_follow_the_planned_share_of_the_run() -> None:
    """Linear decay over 2 iterations x 2 epochs x 2 minibatches, warm-up of the critic over one iteration."""
    rates: list[tuple[float, float]] = []
    recorder = Caller(
        "on_before_step",
        lambda module, stats: rates.append(tuple(group["lr"] for group in module.optimizers().param_groups)),
    )
    module = tiny_module(
        iterations=2,
        actor={"lr": 8e-3},
        critic={"lr": 1.0, "warmup_iterations": 1},
        optimizer={"schedule": "linear", "final_lr_fraction": 0.0},
    )
    fit(module, [recorder])
    assert [actor for actor, _ in rates] == pytest.approx([8e-3, 7e-3, 6e-3, 5e-3, 4e-3, 3e-3, 2e-3, 1e-3])
    assert [critic for _, critic in rates] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25])
    assert [group["lr"] for group in module.optimizers().param_groups] == [0.0, 0.0], "exactly 0 at the end"


# --- verbs -------------------------------------------------------------------------------------------------------


def test_skip_step_moves_no_weight_and_no_moment() -> None:
    module = tiny_module(iterations=1)
    before = weights(module)
    skipper = Caller("on_before_step", lambda module, stats: module.control.skip_step("test"))
    recorder = Recorder()
    trainer = fit(module, [skipper, recorder])
    assert same(before, weights(module)) and not module.optimizers().optimizer.state
    assert trainer.global_step == 0 and module.control.update == 0
    assert not any(stats.stepped for stats in recorder.of("on_minibatch_end"))
    assert trainer.callback_metrics["ppo/steps_skipped"] == 4
    assert all(p.grad is None for p in module.parameters()), "no gradient is left behind"


def test_stop_epochs_in_a_minibatch_ends_the_update_there() -> None:
    recorder = Recorder()
    stopper = Caller(
        "on_minibatch_end",
        lambda module, stats: module.control.stop_epochs("far enough") if stats.minibatch == 0 else None,
    )
    module = tiny_module(iterations=2)
    fit(module, [stopper, recorder])
    assert [(s.iteration, s.epoch, s.minibatch) for s in recorder.of("on_minibatch_end")] == [(1, 0, 0), (2, 0, 0)]
    assert all(p.grad is None for p in module.parameters())


def test_stop_training_ends_after_this_iteration() -> None:
    module = tiny_module(iterations=9)
    fit(module, [Caller("on_minibatch_end", lambda module, stats: module.control.stop_training("enough"))])
    assert module.control.iteration == 1 and module.control.update == 4
    assert module.control.training_stopped == "enough"


@pytest.mark.parametrize(("scope", "kept"), [("minibatch", 3), ("iteration", 0)])
def test_rollback_restores_weights_and_moments_bitwise(scope: str, kept: int) -> None:
    """After two iterations, undo the last of iteration 2's four steps, or the whole of iteration 2."""

    class Undo(RLHFCallback):
        rollback_scopes = frozenset({scope})  # type: ignore[assignment]

        def __init__(self) -> None:
            self.states: list[tuple[dict, dict]] = []

        def remember(self, module: PPOModule) -> None:
            state = module.optimizers().optimizer.state
            moments = {
                f"{i}.{key}": value.clone()
                for i, entries in enumerate(state.values())
                for key, value in entries.items()
            }
            self.states.append((weights(module), moments))

        def on_minibatch_start(self, trainer: Any, module: Any, minibatch: Any) -> None:
            if module.control.iteration == 2:
                self.remember(module)

        def on_minibatch_end(self, trainer: Any, module: Any, stats: Any) -> None:
            if stats.iteration == 2 and stats.epoch == 1 and stats.minibatch == 1:
                assert not same(self.states[-1][0], weights(module))
                module.control.rollback("went wrong", to=scope)

    undo = Undo()
    module = tiny_module(iterations=2)
    trainer = fit(module, [undo])
    undo.remember(module)
    assert same(undo.states[-1][0], undo.states[kept][0]) and same(undo.states[-1][1], undo.states[kept][1])
    assert trainer.callback_metrics["stability/rollbacks"] == 1


def test_a_rollback_that_no_callback_announced_is_a_clear_error() -> None:
    module = tiny_module(iterations=1)
    undo = Caller("on_minibatch_end", lambda module, stats: module.control.rollback("oops"))
    with pytest.raises(RuntimeError, match=r"no callback announces 'iteration' in rollback_scopes"):
        fit(module, [undo])


def test_rolling_the_actor_back_does_not_change_critic_and_moments() -> None:
    """Requested when the next samples are ready: the whole update of iteration 1 is undone, nothing is trained."""

    class Undo(RLHFCallback):
        rollback_scopes = frozenset({"actor"})  # type: ignore[assignment]

        def on_experience_ready(self, trainer: Any, module: Any, experience: Any, stats: Any) -> None:
            if stats.iteration == 2:
                self.critic, self.moments = critic_weights(module), moments(module)
                module.control.rollback("too far", to="actor")

    def critic_weights(module: PPOModule) -> dict[str, torch.Tensor]:
        return {name: weight for name, weight in weights(module).items() if name.startswith("critic.")}

    def moments(module: PPOModule) -> dict[str, torch.Tensor]:
        states = module.optimizers().optimizer.state.values()
        return {f"{i}.{k}": v.clone() for i, entries in enumerate(states) for k, v in entries.items()}

    module, undo, recorder = tiny_module(iterations=2), Undo(), Recorder()
    before = {name: weight for name, weight in weights(module).items() if name.startswith("actor.")}
    trainer = fit(module, [undo, recorder])
    after = weights(module)
    assert same(before, {name: weight for name, weight in after.items() if name.startswith("actor.")})
    assert same(undo.critic, critic_weights(module)) and same(undo.moments, moments(module))
    assert [stats.epochs_used for stats in recorder.of("on_update_end")] == [2, 0]
    assert trainer.callback_metrics["stability/rollbacks"] == 1


def test_there_is_one_copy_of_the_actor_and_only_if_a_callback_needs_it() -> None:
    policy = tiny_policy()
    groups = [{"name": name, "params": list(getattr(policy, name).parameters())} for name in ("actor", "critic")]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    snapshot = Snapshot.of("actor", optimizer)
    assert sum(w.numel() for w in snapshot.weights) == sum(p.numel() for p in policy.actor.parameters())
    assert snapshot.state is None
    module = tiny_module(iterations=1)
    fit(module)
    assert module._update_loop.state_dict() == {"actor": None}


@pytest.mark.parametrize("event", ["on_minibatch_start", "on_minibatch_end", "on_update_end", "on_rollout_start"])
def test_skip_step_outside_of_its_event_is_refused(event: str) -> None:
    caller = Caller(event, lambda module, *args: module.control.skip_step("stray"))
    with pytest.raises(RuntimeError, match=r"control.skip_step \(stray\) acts only in on_before_step"):
        fit(tiny_module(iterations=1), [caller])


def test_stop_epochs_before_the_first_minibatch_skips_the_batch() -> None:
    module, recorder = tiny_module(iterations=1), Recorder()
    before = weights(module)
    stopper = Caller("on_experience_ready", lambda module, *args: module.control.stop_epochs("nothing to learn"))
    trainer = fit(module, [stopper, recorder])
    assert same(before, weights(module)) and not recorder.of("on_minibatch_start")
    assert trainer.callback_metrics["ppo/epochs_used"] == 0


def test_decisions_are_handed_to_the_logger_with_their_reasons() -> None:
    class Keeping(DummyLogger):
        def __init__(self) -> None:
            super().__init__()
            self.rows: list[dict[str, Any]] = []

        def log_decisions(self, rows: list[dict[str, Any]]) -> None:
            self.rows += rows

    logger = Keeping()
    stopper = Caller("on_ppo_epoch_end", lambda module, stats: module.control.stop_epochs("far enough"))
    fit(tiny_module(iterations=2), [stopper], logger=logger)
    assert [(r["iteration"], r["update"], r["verb"], r["reason"]) for r in logger.rows] == [
        (1, 2, "stop_epochs", "far enough"),
        (2, 4, "stop_epochs", "far enough"),
    ]


def test_repeated_decisions_are_printed_three_times(caplog: pytest.LogCaptureFixture) -> None:
    """One quickstart printed a decision sixteen times; the logger keeps all, and rollbacks are always printed."""

    class Keeping(DummyLogger):
        decisions_place = "there/decisions.jsonl"

        def log_decisions(self, rows: list[dict[str, Any]]) -> None:
            kept.extend(row["verb"] for row in rows)

    kept: list[str] = []
    kinds = {1: ("kl/old {:.4f} over target 0.1", 0.12), 2: ("clip fraction {:.1e}", 3e-7)}

    def decide(module: Any, stats: Any) -> None:
        if stats.epoch == 0:
            for text, number in kinds.values():
                module.control.stop_epochs(text.format(number * stats.iteration))
            module.control.rollback(f"over {stats.iteration}")

    decider = Caller("on_ppo_epoch_end", decide)
    decider.rollback_scopes = frozenset({"iteration"})
    with caplog.at_level("INFO"):
        fit(tiny_module(iterations=16), [decider], logger=Keeping())
    said = [line for record in caplog.records for line in record.getMessage().splitlines()]
    assert [line for line in said if "kl/old" in line] == [
        f"iteration {i}: stop_epochs: kl/old {0.12 * i:.4f} over target 0.1" for i in (1, 2, 3)
    ]
    assert len([line for line in said if "clip fraction" in line]) == 3
    assert len([line for line in said if "rollback: over" in line]) == 16
    more = (
        "  more of this kind are not printed, but counted in stability/epochs_stopped "
        "and listed in there/decisions.jsonl"
    )
    # The update's own line, "rolled back: ...", is counted as another kind.
    assert said.count(more) == 3 and kept.count("stop_epochs") == 3 * 16 and kept.count("rollback") == 16


def test_plain_lightning_callbacks_work() -> None:
    class Plain(Callback):
        batches = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.batches += 1

    plain = Plain()
    fit(tiny_module(iterations=2), [plain])
    assert plain.batches == 2


def test_knobs_change_lengths_learning_rates_and_micro_batches() -> None:
    """max_new_tokens bounds responses, lr_scale the learning rate, micro_batch_tokens only the size of passes."""

    def turn(module: PPOModule, *args: Any) -> None:
        module.control.scale("max_new_tokens", 0.5, by="test")
        module.control.scale("lr_scale", 0.0, by="test")

    recorder = Recorder()
    module = tiny_module(iterations=1)
    before = weights(module)
    trainer = fit(module, [Caller("on_rollout_start", turn), recorder])
    [rollout] = recorder.of("on_rollout_end")
    assert rollout.response_ids.shape[1] <= 3
    assert same(before, weights(module)), "steps of size 0"
    assert trainer.callback_metrics["stability/max_new_tokens_multiplier"] == 0.5
    assert trainer.callback_metrics["lr/actor"] == 0.0


# --- gradients ---------------------------------------------------------------------------------------------------


def test_norms_are_per_group_and_before_clipping() -> None:
    a, b = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    a.grad, b.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.3, 0.4])
    groups = [{"params": [a], "name": "actor", "clip_norm": 1.0}, {"params": [b], "name": "critic", "clip_norm": None}]
    optimizer = torch.optim.AdamW(groups)
    norms = gradient_norms(optimizer)
    assert {name: float(norm) for name, norm in norms.items()} == pytest.approx({"actor": 5.0, "critic": 0.5})
    clip_gradients(optimizer, norms, scale=1.0)
    assert a.grad.tolist() == pytest.approx([0.6, 0.8], abs=1e-5)
    assert b.grad.tolist() == pytest.approx([0.3, 0.4])


def test_a_group_counts_as_clipped_where_its_norm_is_over_its_limit() -> None:
    """Without a limit nothing is clipped, whatever the norm."""
    seen = {}
    for actor, critic in ((1e-6, None), (1e6, 1e-6)):
        module = tiny_module(iterations=1, actor={"clip_norm": actor}, critic={"clip_norm": critic})
        fit(module, [recorder := Recorder()])
        seen[actor] = [stats.clipped for stats in recorder.of("on_minibatch_end")]
    assert seen[1e-6] and all(clipped == {"actor": True, "critic": False} for clipped in seen[1e-6])
    assert seen[1e6] and all(clipped == {"actor": False, "critic": True} for clipped in seen[1e6])


def test_float16_gradients_are_clipped_without_their_loss_scale() -> None:
    """Loss scale 1024, true norm 2, limit 1: norm 2 is reported and norm 1 reaches the optimiser."""
    limit = {"lr": 1e-3, "clip_norm": 1.0}

    class Scaled(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            loss = super().micro_batch_loss(micro, metrics)
            vector = self.critic.head.bias  # one parameter with a known gradient: 2
            return loss * 0.0 + 2.0 * vector.sum()

    recorder = Recorder()
    module = tiny_module(cls=Scaled, iterations=1, update={"epochs": 1, "minibatch_size": 16}, critic=limit)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    fit(module, [recorder], plugins=[precision])
    [stats] = recorder.of("on_before_step")
    assert stats.grad_norms["critic"] == pytest.approx(2.0, rel=1e-3)
    # The fused optimiser removes the scale inside its step; its first moment shows the gradient it used.
    moment = module.optimizers().optimizer.state[module.critic.head.bias]["exp_avg"]
    assert float(moment) / (1 - module.settings.optimizer.betas[0]) == pytest.approx(1.0, rel=1e-3)


def test_a_step_whose_gradient_is_not_finite_is_refused_counted_and_warned_about() -> None:
    class Poisoned(PPOModule):
        def micro_batch_loss(self, micro: Any, metrics: Any) -> torch.Tensor:
            return super().micro_batch_loss(micro, metrics) * math.nan

    module = tiny_module(cls=Poisoned, iterations=1)
    before = weights(module)
    recorder = Recorder()
    with pytest.warns(UserWarning, match="step skipped, loss or gradient is not finite"):
        trainer = fit(module, [recorder])
    assert same(before, weights(module))
    assert trainer.callback_metrics["stability/nonfinite_steps"] == 4
    assert math.isnan(trainer.callback_metrics["grad_norm/actor"]), "reported, not hidden"
    assert not any(stats.finite or stats.stepped for stats in recorder.of("on_minibatch_end"))


def test_snapshot_returns_to_an_optimiser_that_had_not_stepped() -> None:
    policy = tiny_policy()
    optimizer = torch.optim.AdamW(policy.actor.parameters(), lr=0.1)
    snapshot = Snapshot.of("iteration", optimizer)
    before = {n: p.detach().clone() for n, p in policy.actor.named_parameters()}
    for p in policy.actor.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    snapshot.restore(optimizer)
    assert not optimizer.state
    assert same(before, dict(policy.actor.named_parameters()))


def test_a_logger_with_any_attribute_names_no_file_of_decisions() -> None:
    """Lightning's DummyLogger (``fast_dev_run``) answers every attribute with a function."""
    said = _more("stop_epochs", [DummyLogger()])
    assert said == "  more of this kind are not printed, but counted in stability/epochs_stopped"


def test_suspect_prompts_are_one_kind_of_decision_whomever_they_name(caplog: pytest.LogCaptureFixture) -> None:
    def decide(module: Any, _: Any) -> None:
        iteration = module.control.iteration
        module.control.note("suspect_prompts", f"unlike the others: {'abcdefgh'[iteration] * 16}: spread +{iteration}")

    with caplog.at_level("INFO"):
        fit(tiny_module(iterations=5), [Caller("on_update_end", decide)])
    said = [record.getMessage() for record in caplog.records if "suspect_prompts" in record.getMessage()]
    assert [line[:12] for line in said] == ["iteration 1:", "iteration 2:", "iteration 3:"]
