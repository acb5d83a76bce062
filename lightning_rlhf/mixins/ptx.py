"""PPO-ptx: the language-model loss on a text is part of every PPO step (InstructGPT, Ouyang et al. 2022, eq. 2)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_rlhf.data.corpus import BlockStream, text_blocks
from lightning_rlhf.distributed.processes import place
from lightning_rlhf.events import MinibatchStats
from lightning_rlhf.experience import MiniBatch
from lightning_rlhf.functional.stats import all_reduce_sum, masked_sum, select_valid
from lightning_rlhf.memory import OutOfMemory, attempt
from lightning_rlhf.mixins.ptx_settings import BLOCK, PTXSettings, ptx_settings
from lightning_rlhf.models.actor import training_mode
from lightning_rlhf.settings import SettingError

if TYPE_CHECKING:
    from lightning_rlhf.module import ActorCriticModule

    Base = ActorCriticModule
else:
    Base = object

KNOB = "ptx_coefficient"


class PTXMixin(Base):
    """Adds ``gamma x mean(-log pi(token))`` over blocks of a text to the loss of every minibatch; off while null.

    Each minibatch takes the next blocks of the text. They are the same on every rank, which computes its share of them,
    spread over its micro-batches; the sum over micro-batches and ranks is divided by the tokens of all blocks. So the
    gradient depends neither on the cut into micro-batches nor on the number of ranks.

    The text is read by the plain policy at temperature 1: noise of ALP belongs to the ratio, and the sampling
    temperature to the samples. Only the actor gets gradients, with LoRA its adapter.

    The position in the text moves on once per minibatch: not when memory ran out and the minibatch is repeated, but
    also when its step is skipped, and a rollback does not turn it back: as with prompts, what was drawn is used. A
    minibatch whose tokens were all rejected takes no step for the text either; if they were rejected before the update,
    it does not use any.

    Args:
        ptx: settings, see :class:`PTXSettings`; ``None`` switches the mixin off.

    Raises:
        SettingError: a value is not allowed.
        DataError: the text cannot be read, or is too short.
    """

    def __init__(self, *args: Any, ptx: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ptx: _State | None = None
        settings = ptx_settings(ptx)
        if settings is None:
            return
        positions = getattr(self.actor.lm.config.get_text_config(), "max_position_embeddings", None)
        if positions is not None and settings.length > positions:
            raise SettingError(f"{BLOCK}.length", settings.length, f"at most the model's {positions} positions")
        field, length = settings.text_field, settings.length
        blocks = text_blocks(settings.source, self.tokenizer, text_field=field, length=length, key=f"{BLOCK}.source")
        if settings.held_out >= len(blocks):
            allowed = (
                f"a number below {len(blocks)}, as the text has {len(blocks)} blocks of {length} tokens "
                f"({BLOCK}.length); shorter blocks, such as {BLOCK}.length={max(length // 2, 1)}, give more"
            )
            raise SettingError(f"{BLOCK}.held_out", settings.held_out, allowed)
        self.control.register(KNOB, settings.coefficient)
        self._ptx = _State(settings, blocks, self.seed)

    # --- extension points --------------------------------------------------------------------------------------------

    def extra_losses(self, minibatch: MiniBatch) -> dict[str, Tensor]:
        """gamma times this micro-batch's share of the text's loss; none while gamma is 0."""
        losses = super().extra_losses(minibatch)
        state = self._ptx
        if state is None:
            return losses
        coefficient = self.control.value(KNOB)
        if coefficient == 0:
            return losses
        blocks, counts = state.share(minibatch.part, minibatch.parts)
        if len(blocks):
            loss, mask = self._text_losses(blocks, counts)
            state.measure(loss, mask)
            losses["ptx/weighted_loss"] = coefficient * select_valid(loss, mask).sum() / state.tokens_per_step
        return losses

    def update_metrics(self) -> dict[str, float]:
        """Loss and perplexity of the text of this iteration's minibatches, gamma, and passes over the text."""
        numbers = super().update_metrics()
        if self._ptx is not None:
            numbers |= self._ptx.finish_update(self.device)
            numbers |= {"ptx/coefficient": self.control.applied[KNOB], "ptx/passes": self._ptx.stream.passes}
        return numbers

    # --- for callbacks -----------------------------------------------------------------------------------------------

    @property
    def held_out_text(self) -> Tensor | None:
        """``[N, length]`` the blocks that are never trained on; ``None`` without PPO-ptx or without such blocks."""
        return None if self._ptx is None or not len(self._ptx.held_out) else self._ptx.held_out

    def read_text(self, source: Any, *, text_field: str, key: str) -> Tensor:
        """``[N, length]`` blocks of another text, of the length of ``module.ptx``; ``key`` is that of ``source``.

        Raises:
            DataError: the text cannot be read, or is too short.
        """
        if self._ptx is None:
            raise RuntimeError("module.ptx is null: there is no length of blocks")
        length = self._ptx.settings.length
        return text_blocks(source, self.tokenizer, text_field=text_field, length=length, key=key)

    @torch.no_grad()
    def text_loss(self, blocks: Tensor) -> float:
        """Mean loss (nats per token) of the policy on blocks that every rank has; changes nothing of the run.

        Every rank computes its share, all get the same number. To be called outside of passes with a gradient.

        Args:
            blocks: ``[N, length]`` token ids, N at least 1.

        Raises:
            OutOfMemory: says which key to lower.
        """
        budget = self.settings.update.score_tokens
        work = partial(self._text_sums, *_of_rank(blocks), rows=max(1, budget // blocks.shape[1]))
        with training_mode(self.actor, False), self.trainer.precision_plugin.forward_context():
            sums, error = attempt(work)
        if error or sums is None:
            raise OutOfMemory(f"{error}: lower module.update.score_tokens = {budget}")
        total, count = all_reduce_sum(sums).tolist()
        return total / count

    def _text_sums(self, blocks: Tensor, counts: Tensor, rows: int) -> Tensor:
        """``[2]`` float64: summed loss and number of tokens, ``rows`` blocks at a time."""
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        for part, counted in zip(blocks.split(rows), counts.split(rows), strict=True):
            loss, mask = self._text_losses(part, counted)
            sums += torch.stack([masked_sum(loss, mask), mask.sum(dtype=torch.float64)])
        return sums

    def _text_losses(self, blocks: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """``[N, length - 1]`` loss of each token but a block's first, and a mask of the tokens of blocks that count."""
        ids = blocks.to(self.device).long()
        output = self.actor(ids, torch.ones_like(ids, dtype=torch.bool), ids.shape[1] - 1)
        return -output.logprobs, counts.to(self.device)[:, None].expand_as(output.logprobs)

    # --- Lightning hooks ---------------------------------------------------------------------------------------------

    def configure_callbacks(self) -> list[Callback]:
        """Add the callback that moves on in the text at the end of every minibatch."""
        callbacks = list(super().configure_callbacks())  # type: ignore[arg-type]
        trainer: Any = self.trainer
        if self._ptx is None or self._ptx.clock in trainer.callbacks:
            return callbacks  # already there from an earlier stage; Lightning would log a replacement
        return [*callbacks, self._ptx.clock]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """The position in the text, beside what the base class saves."""
        super().on_save_checkpoint(checkpoint)
        if self._ptx is not None:
            checkpoint["lightning_rlhf"]["ptx"] = self._ptx.stream.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore it; if the checkpoint's run had no text, begin at its start."""
        super().on_load_checkpoint(checkpoint)
        saved = checkpoint["lightning_rlhf"].get("ptx")
        if self._ptx is not None and saved is not None:
            self._ptx.stream.load_state_dict(saved)


class _State:
    """State of the mixin: the text, its position, and what was measured on it since the last metrics."""

    def __init__(self, settings: PTXSettings, blocks: Tensor, seed: int) -> None:
        self.settings = settings
        held_out = torch.zeros(len(blocks), dtype=torch.bool)
        held_out[[(2 * i + 1) * len(blocks) // (2 * settings.held_out) for i in range(settings.held_out)]] = True
        self.stream, self.held_out = BlockStream(blocks[~held_out], seed=seed), blocks[held_out]
        self.clock = _Clock(self)
        self._minibatch: list[Tensor] = []
        self._update: list[Tensor] = []

    @property
    def tokens_per_step(self) -> int:
        """Predicted tokens of a minibatch's blocks over all ranks: the denominator."""
        return self.settings.blocks_per_step * (self.settings.length - 1)

    def share(self, part: int, parts: int) -> tuple[Tensor, Tensor]:
        """The blocks of one of this rank's micro-batches, and ``[N]`` whether each counts.

        Ranks with as many micro-batches run equally many passes, which a sharded model requires.
        """
        if part == 0:
            self._minibatch = []  # of an attempt that ran out of memory
        blocks, counts = _of_rank(self.stream.upcoming(self.settings.blocks_per_step))
        mine = slice(part * len(blocks) // parts, (part + 1) * len(blocks) // parts)
        return blocks[mine], counts[mine]

    def measure(self, loss: Tensor, mask: Tensor) -> None:
        """Add up the loss of one micro-batch."""
        self._minibatch.append(torch.stack([masked_sum(loss.detach(), mask), mask.sum(dtype=torch.float64)]))

    def finish_minibatch(self) -> None:
        """Move on in the text, if the minibatch had a share of it."""
        if self._minibatch:
            self.stream.advance(self.settings.blocks_per_step)
        self._update += self._minibatch
        self._minibatch = []

    def finish_update(self, device: torch.device) -> dict[str, float]:
        """Loss and perplexity over all ranks; absent if no text was read."""
        none = torch.zeros(2, dtype=torch.float64, device=device)
        total, count = all_reduce_sum(torch.stack([none, *self._update]).sum(0)).tolist()
        self._update = []
        return {"ptx/loss": total / count, "ptx/perplexity": perplexity(total / count)} if count else {}


class _Clock(Callback):
    """Ends the share that a minibatch has of the text; the state is saved by the module."""

    def __init__(self, state: _State) -> None:
        self._state = state

    def on_minibatch_end(self, trainer: Trainer, module: LightningModule, stats: MinibatchStats) -> None:
        self._state.finish_minibatch()


def perplexity(loss: float) -> float:
    """``exp(loss)`` of nats per token; infinite where that is too large for a number."""
    return math.exp(loss) if not loss > 700 else math.inf


def _of_rank(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's share of blocks that every rank has, and ``[N]`` bool, whether each counts.

    Every rank gets equally many. A rank for which there are too few gets the last block, which does not count there.
    """
    rank, world = place()
    index = torch.arange(rank, world * -(-len(blocks) // world), world)
    return blocks[index.clamp(max=len(blocks) - 1)], index < len(blocks)
