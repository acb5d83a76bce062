"""The rollout of an iteration: generated when needed or one iteration ahead, whole or in parts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_rlhf.distributed.processes import together
from lightning_rlhf.experience import Experience, PromptBatch, Rollout
from lightning_rlhf.memory import memory_policy
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.models.sharding import gathered, is_sharded
from lightning_rlhf.rewards.safety import replaced
from lightning_rlhf.rewards.termination import classify
from lightning_rlhf.rollout import AheadRollouts
from lightning_rlhf.rollout.binding import check_finite
from lightning_rlhf.rollout.in_parts import generate_in_parts
from lightning_rlhf.scoring import response_texts, score_experience
from lightning_rlhf.screening import screened

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule


class RolloutSource:
    """Requests responses from the module's engine; with ``rollout.lag=1`` one iteration ahead."""

    def __init__(self, module: ActorCriticModule) -> None:
        self.module = module
        self.drawn_late = False
        """Whether the last rollout was generated late, although rollouts run ahead."""
        self._ahead = AheadRollouts()

    def generate(self, prompts: PromptBatch, *, greedy: bool = False) -> Rollout:
        """Responses generated now, on the module's device."""
        with self.weights():
            return self.checked(self._request(prompts, greedy)()).to(self.module.device)

    @torch.no_grad()
    def probe(self, prompts: PromptBatch, max_new_tokens: int) -> tuple[Rollout, Tensor]:
        """One answer to each prompt and the trainer's log-probabilities, see :meth:`ActorCriticModule.probe`."""
        module = self.module
        limit = min(max_new_tokens, int(module.control.value("max_new_tokens")))
        with module.trainer.precision_plugin.forward_context():
            with self.weights():
                answers = module.engine.generate(prompts, samples=1, max_new_tokens=limit, seed=module.seed)
                answers = self.checked(answers)
            answers = answers.to(module.device)
            experience = Experience.from_rollout(answers, prompts.texts, texts=[""] * len(answers))
            temperature, budget = module.engine.sampling.temperature, module.settings.update.score_tokens
            score_experience(experience, module.actor, None, None, temperature=temperature, budget=budget)
        return answers, experience.require("old_logprobs")

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout; refuse missing log-probabilities unless the module handles them.

        Raises:
            FloatingPointError: a token has no finite log-probability and the module does not handle that.
        """
        if not self.module.accepts_missing_logprobs:
            codes = rollout.safety
            check_finite(rollout if codes is None else rollout.select((~replaced(codes)).nonzero().flatten()))
        return rollout

    def weights(self) -> AbstractContextManager[None]:
        """Context for calls of an engine that generates with the actor's own weights: gathers sharded ones."""
        return gathered(self.module.actor) if self._shares_weights else nullcontext()

    @property
    def gathers(self) -> bool:
        """Whether :meth:`weights` is a collective operation, in which all ranks take part."""
        return self._shares_weights and is_sharded(self.module.actor)

    @property
    def _shares_weights(self) -> bool:
        return self.module.engine.shares_weights

    def next(self, prompts: PromptBatch) -> Rollout:
        """The rollout of this iteration, generated ahead or else now; then start the next one.

        Each rank generates its own; an error on one rank is raised on all.

        Raises:
            RuntimeError: even a rollout generated now is staler than ``rollout.max_staleness`` allows.
        """
        module, ahead = self.module, self.module.engine.ahead
        rollout = together(partial(self._of_this_iteration, prompts))
        if ahead.lag and module.control.iteration < module.iterations:
            following = module.trainer.datamodule.train_batch(module.control.iteration)  # type: ignore[attr-defined]
            self._ahead.begin(self._request(following), module.device)
        return rollout.to(module.device)

    def _of_this_iteration(self, prompts: PromptBatch) -> Rollout:
        ahead = self.module.engine.ahead
        rollout = self._ahead.take(prompts)
        if rollout is not None:
            usable = not self._too_stale(rollout) and self._complete(rollout)
            rollout = self.checked(rollout) if usable else None
        self.drawn_late = rollout is None and ahead.lag > 0
        if rollout is None:
            rollout = self.generate(prompts)
            if self._too_stale(rollout):
                raise RuntimeError(
                    f"the engine still draws with weights {int(self.staleness(rollout).max())} iterations old, which "
                    f"rollout.max_staleness = {ahead.max_staleness} forbids: its weights are not updated"
                )
        return rollout

    def wait(self) -> None:
        """Wait until no rank generates, so that weights may change. An error on one rank is raised on all."""
        if self.module.engine.ahead.lag:
            together(self._ahead.wait)

    def close(self) -> None:
        """End the thread of rollouts generated ahead."""
        self._ahead.close()

    def staleness(self, rollout: Rollout) -> Tensor:
        """``[B]`` iterations by which the weights that drew each sample lie behind the policy."""
        return self.module.control.iteration - 1 - rollout.policy_version

    def measure(self, rollout: Rollout, metrics: MetricBatch) -> None:
        """Add the metrics of staleness."""
        staleness = self.staleness(rollout).float()
        metrics.mean("rollout/staleness_mean", staleness)
        metrics.max("rollout/staleness_max", staleness)

    def check(self) -> None:
        """Check that the data module can return the next batch early, if rollouts run ahead.

        Raises:
            RuntimeError: it has no ``train_batch``.
        """
        data = getattr(self.module.trainer, "datamodule", None)
        if self.module.engine.ahead.lag and not hasattr(data, "train_batch"):
            raise RuntimeError(
                "rollout.lag = 1 needs a data module with a method train_batch(index) -> PromptBatch, such as "
                "PromptDataModule; this one has none"
            )

    def state_dict(self) -> dict[str, Any]:
        """The rollout generated ahead, if there is one."""
        return self._ahead.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a rollout generated ahead; without ``rollout.lag`` it is dropped, as it would be off-policy."""
        if self.module.engine.ahead.lag:
            self._ahead.load_state_dict(state, self.module.device)

    def _request(self, prompts: PromptBatch, greedy: bool = False) -> Callable[[], Rollout]:
        """A call of the engine that may run later with the settings of now; in parts if memory requires."""
        module = self.module
        limit, samples = int(module.control.value("max_new_tokens")), 1 if greedy else module.engine.sampling.samples
        policy, pad_id = memory_policy(module.trainer), module.tokenizer.pad_token_id or 0

        def drawn(asked: PromptBatch, samples: int, seed: int) -> Rollout:
            one = partial(module.engine.generate, samples=samples, max_new_tokens=limit, seed=seed, greedy=greedy)
            return generate_in_parts(one, asked, policy, module.control, pad_id)

        whole = partial(drawn, prompts, samples, module.seed)
        if module.safety is not None and not greedy:  # held-out answers are measured as they are
            texts, reply = partial(response_texts, module.tokenizer, end_ids=module.end_ids), module.safe_reply
            fixed: dict[str, Any] = {"seed": module.seed, "pad_id": pad_id, "reply": reply}
            if module.safety.answers is not None:  # those of now, as a draw ahead may end at any moment of the update
                fixed |= {"answers": module.safety.answers.copy(), "longest": limit}
            whole = partial(screened, drawn, prompts, samples, module.safety, texts, **fixed)
        return partial(_finished, whole, limit, module.settings.termination.min_tokens)

    def _complete(self, rollout: Rollout) -> bool:
        """Whether a rollout from a checkpoint knows its length limit, and was filtered exactly if this run filters."""
        return rollout.max_new_tokens is not None and (rollout.safety is None) == (self.module.safety is None)

    def _too_stale(self, rollout: Rollout) -> bool:
        limit = self.module.engine.ahead.max_staleness
        return limit is not None and bool((self.staleness(rollout) > limit).any())


def _finished(generate: Callable[[], Rollout], limit: int, min_tokens: int) -> Rollout:
    """A rollout with the length limit it was drawn under, and its early responses told from the natural ones."""
    rollout = classify(generate(), min_tokens)
    rollout.max_new_tokens = torch.full_like(rollout.finish, limit)
    return rollout
