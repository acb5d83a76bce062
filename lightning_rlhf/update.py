"""The update of one iteration: epochs x minibatches x micro-batches, and everything that may interrupt them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_rlhf.control import SCOPES, Scope
from lightning_rlhf.distributed.parallel import (
    average_gradients,
    gather_experience,
    in_step,
    local_gradients,
)
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.events import EpochStats, MinibatchStats, UpdateStats, emit
from lightning_rlhf.experience import Experience, MiniBatch, split_by_tokens
from lightning_rlhf.functional.losses import LossScale
from lightning_rlhf.functional.stats import largest_over_ranks
from lightning_rlhf.gradients import clip_gradients, gradient_norms, loss_scale
from lightning_rlhf.memory import OutOfMemory, attempt, free_memory, memory_policy
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.minibatches import MinibatchPlan, without_loss
from lightning_rlhf.models.sharding import is_sharded
from lightning_rlhf.objective import ACCEPTED_TOKENS
from lightning_rlhf.snapshot import Snapshot

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

BROKEN_NORMS = "nonfinite gradient norms"


class UpdateLoop:
    """Trains the module on one batch of experience and obeys ``module.control`` while doing so.

    Every decision is taken between backward passes, on numbers reduced over all ranks.
    """

    def __init__(self, module: ActorCriticModule) -> None:
        self.module = module
        self.settings = module.settings.update
        self.metrics = MetricBatch()
        self._copies: dict[Scope, Snapshot] = {}

    def run(self, experience: Experience) -> UpdateStats:
        """Train on this experience for all epochs, unless callbacks end them early; ``metrics`` holds the metrics."""
        module, control = self.module, self.module.control
        self.metrics = MetricBatch()
        trainer: Any = module.trainer
        scopes = {scope for callback in trainer.callbacks for scope in getattr(callback, "rollback_scopes", ())}
        self._obey_rollback()  # requested in on_experience_ready: undoes the previous update
        actor = self._copies.get("actor")
        self._copies = {scope: Snapshot.of(scope, self.optimizer) for scope in scopes if scope == "iteration"}
        if "actor" in scopes:
            self._copies["actor"] = Snapshot.of("actor", self.optimizer, over=actor)
        experience = gather_experience(experience)
        scale = LossScale(module.settings.loss.aggregation, horizon=module.engine.sampling.max_new_tokens)
        plan = MinibatchPlan(experience, self.settings.minibatch_size, module.seed, control.iteration, scale)
        step = 1.0 / (self.settings.epochs * len(plan))
        epochs: list[EpochStats] = []
        finished: list[MinibatchStats] = []
        for epoch in range(self.settings.epochs):
            if control.wants("stop_epochs"):
                break
            with control.allow("rollback"):
                emit(module, "on_ppo_epoch_start", epoch)
                done = self._epoch(experience, plan, epoch, undo_step="minibatch" in scopes)
                finished += done
                if done:
                    epochs.append(EpochStats.over(done))
                    emit(module, "on_ppo_epoch_end", epochs[-1])
            self._obey_rollback()
        control.take("stop_epochs")
        self._copies.pop("iteration", None)
        module.set_learning_rates(control.iteration, step)
        last = epochs[-1] if epochs else None
        steps = sum(stats.stepped for stats in finished)
        stats = UpdateStats(
            iteration=control.iteration,
            epochs_used=len(epochs),
            steps=steps,
            steps_skipped=len(finished) - steps,
            kl_old=last.kl_old if last else math.nan,
            kl_ref=last.kl_ref if last else math.nan,
            clip_fraction=last.clip_fraction if last else math.nan,
            entropy=last.entropy if last else math.nan,
        )
        control.freeze()  # what callbacks set now acts in the next iteration
        emit(module, "on_update_end", stats)
        return stats

    @property
    def optimizer(self) -> Any:
        """Lightning's wrapper of the one optimiser; stepping it moves the trainer's counters."""
        return self.module.optimizers()

    def state_dict(self) -> dict[str, Any]:
        """The copy of the actor's weights that is kept between iterations, if a callback needs it."""
        return {"actor": self._copies["actor"].weights if "actor" in self._copies else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._copies = {} if state["actor"] is None else {"actor": Snapshot(state["actor"], ["actor"])}

    def _epoch(
        self, experience: Experience, plan: MinibatchPlan, epoch: int, *, undo_step: bool
    ) -> list[MinibatchStats]:
        control = self.module.control
        done: list[MinibatchStats] = []
        for index, (rows, lengths, scale) in enumerate(plan.epoch(epoch)):
            if scale.tokens == 0:
                # All tokens were rejected: counted, but no step, as weight decay and momentum would move the weights.
                control.counts["empty_minibatches"] += 1
                continue
            if len(rows):
                minibatch = MiniBatch.from_experience(experience, rows, scale)
            else:  # fewer rows than ranks: this rank computes on a row with an empty loss mask
                minibatch, lengths = plan.idle(experience, scale)
            if undo_step:
                self._copies["minibatch"] = Snapshot.of("minibatch", self.optimizer)
            step = 1.0 / (self.settings.epochs * len(plan))
            self.module.set_learning_rates(control.iteration - 1 + (epoch * len(plan) + index) * step, step)
            stats = self._minibatch(minibatch, lengths, epoch, index)
            if stats.tokens:
                done.append(stats)
            self._obey_rollback()
            self._copies.pop("minibatch", None)
            if control.wants("stop_epochs"):
                break
        return done

    def _minibatch(
        self, minibatch: MiniBatch, lengths: list[tuple[int, int]], epoch: int, index: int
    ) -> MinibatchStats:
        """Gradients, callbacks, and the optimiser step unless it is skipped.

        If rejection depends on the current policy, it may reject all tokens of the minibatch. Then no step is taken, as
        weight decay, momentum and terms of other losses would move the weights.
        """
        module, control, optimizer = self.module, self.module.control, self.optimizer
        emit(module, "on_minibatch_start", minibatch)
        batch = self._gradients(minibatch, lengths)
        average_gradients(module)
        scale = loss_scale(module)
        norms = gradient_norms(optimizer)
        for name, norm in norms.items():
            batch.max(f"grad_norm/{name}", norm / scale)
        # Counted separately: the maximum over ranks need not be NaN if one rank's norm is.
        batch.sum(BROKEN_NORMS, torch.stack([~norm.isfinite() for norm in norms.values()]))
        numbers = batch.compute()
        stats = _minibatch_stats(module, numbers, epoch, index)
        if not stats.tokens:
            control.counts["empty_minibatches"] += 1
            optimizer.zero_grad(set_to_none=True)
            emit(module, "on_minibatch_end", stats)
            return stats
        with control.allow("skip_step"):
            emit(module, "on_before_step", stats)
        if not stats.finite:
            self._refuse_step(stats, scale)
        elif control.take("skip_step") is None:
            clip_gradients(optimizer, norms, scale)
            optimizer.step()
            control.update += 1
            stats = replace(stats, stepped=True)
        optimizer.zero_grad(set_to_none=True)
        self._record(numbers, stats)
        emit(module, "on_minibatch_end", stats)
        return stats

    def _gradients(self, minibatch: MiniBatch, lengths: list[tuple[int, int]]) -> MetricBatch:
        """Gradients and metrics of the whole minibatch; if memory runs out, again from its start in smaller pieces.

        Outside the backward passes the ranks agree whether memory ran out on any of them, so that all repeat together.
        With a sharded model they cannot agree: the others wait for gathered weights inside a forward or backward pass.
        There the micro-batch size is fixed.

        Raises:
            OutOfMemory: a single sequence does not fit, or the model is sharded.
        """
        module, control = self.module, self.module.control
        policy, sharded = memory_policy(module.trainer), is_sharded(module.actor)
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            budget, tried = int(control.value("micro_batch_tokens")), Tried()
            work = partial(self._accumulate, minibatch, lengths, budget, tried)
            if policy is None and not sharded:
                return work()
            batch, error = attempt(work)
            if error and sharded:
                raise OutOfMemory(
                    f"{error}: a micro-batch of {tried.tokens} tokens does not fit, and with a sharded model it cannot "
                    f"be halved on the way; lower module.update.micro_batch_tokens = {budget}"
                )
            if batch is not None and (sharded or policy is None):
                return batch
            mine = [1.0, float(tried.rows == 1), float(tried.tokens)] if error else [0.0, 0.0, 0.0]
            failed, single, tokens = largest_over_ranks(mine, module.device)
            if not failed and batch is not None:
                return batch
            batch = None
            self.optimizer.zero_grad(set_to_none=True)
            free_memory()
            error = error or "another rank ran out of memory"
            if single:
                raise OutOfMemory(f"{error}: not even one sequence of {int(tokens)} tokens fits into memory")
            assert policy is not None
            policy.after_update_oom(control, int(tokens), error)
            if int(control.value("micro_batch_tokens")) >= budget:
                raise OutOfMemory(f"{error}: the knob micro_batch_tokens stayed at {budget}")

    def _accumulate(
        self, minibatch: MiniBatch, lengths: list[tuple[int, int]], budget: int, tried: Tried
    ) -> MetricBatch:
        """One forward and backward pass per micro-batch."""
        module, batch = self.module, MetricBatch()
        _, world = place()
        with local_gradients(module):
            parts = [part for _, part in split_by_tokens(minibatch, lengths, budget, self.settings.micro_batch_size)]
            parts = in_step(module.actor, parts, without_loss(parts[-1]))
            for number, part in enumerate(parts):
                micro = replace(part, part=number, parts=len(parts))
                tried.rows, tried.tokens = len(micro), micro.response_mask.numel() + micro.prompt_mask.numel()
                # The losses of all ranks sum to the minibatch's loss, but gradients are averaged over ranks: hence
                # ``world``.
                module.manual_backward(module.micro_batch_loss(micro, batch) * world)
        return batch

    def _refuse_step(self, stats: MinibatchStats, scale: float) -> None:
        control = self.module.control
        control.take("skip_step")
        control.counts["nonfinite_steps"] += 1
        scaler = getattr(self.module.trainer.precision_plugin, "scaler", None)
        if scaler is not None and scale > 1:
            # The scaler lowers its loss scale after overflows, but does not see skipped steps: lower it here.
            scaler.update(scale * scaler.get_backoff_factor())
        value = "" if self.module.critic is None else f", value loss {stats.value_loss:g}"
        rank_zero_warn(
            f"iteration {stats.iteration}, epoch {stats.epoch}, minibatch {stats.minibatch}: step skipped, loss or "
            f"gradient is not finite (policy loss {stats.policy_loss:g}{value}, "
            f"gradient norms {stats.grad_norms})"
        )

    def _obey_rollback(self) -> None:
        control = self.module.control
        scope: Scope | None = control.take_rollback()
        if scope is None:
            return
        snapshot = self._copies.get(scope)
        if snapshot is None:
            raise RuntimeError(
                f"rollback to the {scope} was requested, but no callback announces {scope!r} in rollback_scopes "
                "(or the event lies outside of it), so no copy of the weights was kept"
            )
        snapshot.restore(self.optimizer)
        control.counts["rollbacks"] += 1
        if scope != "minibatch":
            control.stop_epochs(f"rolled back: {SCOPES[scope]}")

    def _record(self, numbers: dict[str, float], stats: MinibatchStats) -> None:
        """Means over the minibatches of the iteration; a maximum stays a maximum."""
        for name, value in numbers.items():
            number = torch.tensor(value, dtype=torch.float64)
            if name == "ppo/ratio_max":
                self.metrics.max(name, number)
            elif name == "ppo/ratio_min":
                self.metrics.min(name, number)
            else:
                self.metrics.mean(name, number)
        for name, clipped in stats.clipped.items():
            self.metrics.mean(f"grad_clipped/{name}", torch.tensor(float(clipped), dtype=torch.float32))


@dataclass
class Tried:
    """Size of the micro-batch that was last started."""

    rows: int = 0
    tokens: int = 0


def _minibatch_stats(module: ActorCriticModule, numbers: dict[str, float], epoch: int, index: int) -> MinibatchStats:
    """The stats for callbacks; removes the two counts that are no metrics from ``numbers``."""
    broken, tokens = numbers.pop(BROKEN_NORMS), numbers.pop(ACCEPTED_TOKENS)
    norms = {k.removeprefix("grad_norm/"): v for k, v in numbers.items() if k.startswith("grad_norm/")}
    losses = [numbers[name] for name in ("ppo/policy_loss", "ppo/value_loss") if name in numbers]
    limits = {group["name"]: group["clip_norm"] for group in module.optimizers().param_groups}  # type: ignore[union-attr]

    def measured(name: str) -> float:
        return numbers.get(name, math.nan) if tokens else math.nan

    return MinibatchStats(
        iteration=module.control.iteration,
        update=module.control.update,
        epoch=epoch,
        minibatch=index,
        tokens=tokens,
        policy_loss=measured("ppo/policy_loss"),
        value_loss=measured("ppo/value_loss"),
        kl_old=measured("kl/old"),
        kl_ref=measured("kl/ref_update"),
        clip_fraction=measured("ppo/clip_fraction"),
        ratio_max=measured("ppo/ratio_max"),
        entropy=measured("entropy/update"),
        grad_norms=norms,
        clipped={name: limits[name] is not None and norm > limits[name] for name, norm in norms.items()},
        finite=not broken and all(math.isfinite(value) for value in (*losses, *norms.values())),
    )
