"""Settings of the module, one small dataclass per config block; each checks its own values when built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Any, TypeVar, get_args

from lightning_rlhf.bounds import bounded, is_number, too_large
from lightning_rlhf.errors import SettingError
from lightning_rlhf.functional.choices import Aggregation, KLEstimator, RatioLevel
from lightning_rlhf.functional.schedules import Schedule
from lightning_rlhf.kinds import blank, scalar_text, wrong_kind

_Settings = TypeVar("_Settings")


def _one_of(block: str, settings: object, name: str, allowed: tuple[str, ...]) -> None:
    value = getattr(settings, name)
    if value not in allowed:
        near = get_close_matches(str(value), allowed, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise SettingError(f"{block}.{name}", value, "one of " + ", ".join(allowed) + hint)


@dataclass(frozen=True)
class UpdateSettings:
    """How one batch of experience is used: epochs x minibatches x micro-batches."""

    epochs: int = 2
    """Passes over the experience of one iteration (the hard limit; callbacks may end them earlier)."""
    minibatch_size: int = 32
    """Sequences per optimiser step."""
    micro_batch_tokens: int = 8192
    """Tokens (padding included) of one forward and backward pass; changes memory and speed, never the gradient."""
    micro_batch_size: int | None = None
    """Sequences per micro-batch at most, whatever the token budget would allow; null: no such limit."""
    score_tokens: int = 16384
    """Tokens (padding included) of one forward pass without gradient (old, reference and value scoring)."""

    def __post_init__(self) -> None:
        bounded(
            "module.update",
            at_least=1,
            whole=True,
            epochs=self.epochs,
            minibatch_size=self.minibatch_size,
            micro_batch_tokens=self.micro_batch_tokens,
            score_tokens=self.score_tokens,
        )
        bounded("module.update", at_least=1, whole=True, optional=True, micro_batch_size=self.micro_batch_size)
        if self.micro_batch_size is not None and self.micro_batch_size > self.minibatch_size:
            raise SettingError(
                "module.update.micro_batch_size",
                self.micro_batch_size,
                f"at most module.update.minibatch_size = {self.minibatch_size}; a micro-batch is a part of a minibatch",
            )


ESTIMATORS = ("gae", "grpo", "rloo", "reinforce_plus_plus")
WHITENED = ("gae", "reinforce_plus_plus")
"""Estimators whose advantages ``advantage.whiten`` acts on; the others compare the answers to one prompt."""


@dataclass(frozen=True)
class AdvantageSettings:
    """From rewards and values to advantages."""

    estimator: str = "gae"
    """gae (needs a critic); grpo and rloo (need several samples per prompt); reinforce_plus_plus."""
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten: bool = True
    """Advantages to mean 0 and variance 1 over all valid tokens of all ranks (gae and reinforce_plus_plus)."""
    normalise_std: bool = True
    """grpo: divide by the group's standard deviation (off: Dr. GRPO)."""

    def __post_init__(self) -> None:
        _one_of("module.advantage", self, "estimator", ESTIMATORS)
        bounded("module.advantage", at_least=0, at_most=1, gamma=self.gamma, gae_lambda=self.gae_lambda)


@dataclass(frozen=True)
class TerminationSettings:
    """What happens to a response that did not end naturally, see :mod:`lightning_rlhf.rewards.termination`."""

    min_tokens: int = 5
    """A response with fewer tokens than this before its end token is early; 0: none is."""
    early: str = "keep"
    """keep, penalty (added to the score) or drop (the response leaves all statistics and the loss)."""
    early_penalty: float = -2.0
    truncated: str = "keep"
    """keep, penalty, drop_reward (KL penalty alone), bootstrap (gae: the critic's value goes on) or soft_overlong."""
    truncated_penalty: float = -2.0
    overlong_cache: float = 0.2
    """soft_overlong: the last tokens before the length limit, in which the penalty grows; below 1 a share of it."""
    overlong_factor: float = 1.0
    """soft_overlong: minus the penalty at the length limit."""

    def __post_init__(self) -> None:
        block = "module.termination"
        bounded(block, at_least=0, whole=True, min_tokens=self.min_tokens)
        _one_of(block, self, "early", ("keep", "penalty", "drop"))
        _one_of(block, self, "truncated", ("keep", "penalty", "drop_reward", "bootstrap", "soft_overlong"))
        bounded(block, below=0, early_penalty=self.early_penalty, truncated_penalty=self.truncated_penalty)
        bounded(block, above=0, overlong_factor=self.overlong_factor)
        cache = self.overlong_cache
        if not is_number(cache) or not (0 < cache < 1 or (isinstance(cache, int) and cache >= 1)):
            allowed = "a finite number > 0 and < 1, a share of the length limit, or a whole number >= 1, tokens"
            raise SettingError(f"{block}.overlong_cache", cache, f"{allowed}{too_large(cache)}")


@dataclass(frozen=True)
class RewardSettings:
    """What happens to the score of a sequence before advantages are computed."""

    normalise: str = "batch"
    """Z-score of the sequence reward: none, batch (this iteration, all ranks), running (all iterations so far)."""
    clip: float | None = None
    """Scores are clipped to [-clip, clip] before normalisation; null: not at all."""

    def __post_init__(self) -> None:
        _one_of("module.reward_processing", self, "normalise", ("none", "batch", "running"))
        bounded("module.reward_processing", above=0, optional=True, clip=self.clip)


@dataclass(frozen=True)
class LossSettings:
    """The PPO objective."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]; clip-higher (DAPO) sets ``clip_high`` larger."""
    dual_clip: float | None = None
    """Lower bound -A * dual_clip of the objective for negative advantages (Ye et al. 2020); null: off."""
    ratio_level: RatioLevel = "token"
    """token (PPO) or sequence (GSPO, Zheng et al. 2025: one length-normalised ratio per sequence)."""
    aggregation: Aggregation = "token-mean"
    """How token losses become one number; see ``functional.losses.aggregate``."""
    value_clip: float | None = 0.2
    """Value predictions are clipped to +- this around the old ones; null: plain squared error."""
    value_coefficient: float = 0.1
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus; at 0 no gradient of the entropy is computed."""

    def __post_init__(self) -> None:
        bounded("module.loss", above=0, below=1, clip_low=self.clip_low)
        bounded("module.loss", above=0, clip_high=self.clip_high)
        bounded("module.loss", above=0, optional=True, value_clip=self.value_clip)
        bounded("module.loss", above=1, optional=True, dual_clip=self.dual_clip)
        bounded("module.loss", at_least=0, value_coefficient=self.value_coefficient)
        bounded("module.loss", at_least=0, entropy_coefficient=self.entropy_coefficient)
        _one_of("module.loss", self, "ratio_level", get_args(RatioLevel))
        _one_of("module.loss", self, "aggregation", get_args(Aggregation))


@dataclass(frozen=True)
class KLSettings:
    """The KL penalty to the reference model."""

    coefficient: float = 0.02
    """beta; the start value where a callback steers the knob ``kl_coefficient``."""
    estimator: KLEstimator = "k1"
    """k1, k2, k3 or abs (Schulman, "Approximating KL divergence"), per token, current policy against reference."""
    placement: str = "reward"
    """reward: subtracted from each token's reward; loss: added to the loss (k2 or k3)."""

    def __post_init__(self) -> None:
        bounded("module.kl", at_least=0, coefficient=self.coefficient)
        _one_of("module.kl", self, "estimator", get_args(KLEstimator))
        _one_of("module.kl", self, "placement", ("reward", "loss"))
        if self.placement == "loss" and self.estimator not in ("k2", "k3"):
            raise SettingError(
                "module.kl.estimator", self.estimator, "k2 or k3 where kl.placement is loss (see functional.kl)"
            )


@dataclass(frozen=True)
class GroupSettings:
    """Optimiser settings of one parameter group (actor, critic)."""

    lr: float
    """Peak learning rate; what suits depends on the model and on the group."""
    clip_norm: float | None = 1.0
    """Limit of the gradient norm of this group; null: no clipping."""
    warmup_iterations: int = 0
    """Iterations over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        bounded("module.<group>", above=0, lr=self.lr)
        bounded("module.<group>", above=0, optional=True, clip_norm=self.clip_norm)
        bounded("module.<group>", at_least=0, warmup_iterations=self.warmup_iterations, weight_decay=self.weight_decay)


@dataclass(frozen=True)
class PromptGroupSettings:
    """What is done per group of prompts; ``data.group_column`` says which prompts are a group."""

    weights: Mapping[str, float] | None = None
    """Factor on the advantages of each group's sequences, so on their share of the policy gradient; 1 if not given."""
    normalise: str = "none"
    """none; rewards: the reward's z-score takes each group's own mean and deviation; advantages: whitening does."""
    min_samples: int = 8
    """A group with fewer sequences takes the mean and deviation of all groups together."""

    def __post_init__(self) -> None:
        block = "module.groups"
        _one_of(block, self, "normalise", ("none", "rewards", "advantages"))
        bounded(block, at_least=2, whole=True, min_samples=self.min_samples)
        if self.weights is not None:
            weights = {scalar_text(group) or str(group): weight for group, weight in self.weights.items()}
            for group, weight in weights.items():
                if not is_number(weight) or weight < 0:
                    raise SettingError(f"{block}.weights.{group}", weight, "a finite number >= 0")
            object.__setattr__(self, "weights", weights)


@dataclass(frozen=True)
class OptimizerSettings:
    """What the groups share: one fused AdamW and one schedule."""

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    schedule: Schedule = "constant"
    """After warm-up: constant, linear or cosine decay to ``final_lr_fraction`` at the last planned update."""
    final_lr_fraction: float = 0.1

    def __post_init__(self) -> None:
        if not isinstance(self.betas, (list, tuple)):
            raise SettingError("module.optimizer.betas", self.betas, "two numbers in [0, 1)")
        object.__setattr__(self, "betas", tuple(self.betas))
        if len(self.betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise SettingError("module.optimizer.betas", self.betas, "two numbers in [0, 1)")
        bounded("module.optimizer", above=0, eps=self.eps)
        bounded("module.optimizer", at_least=0, at_most=1, final_lr_fraction=self.final_lr_fraction)
        _one_of("module.optimizer", self, "schedule", get_args(Schedule))


@dataclass(frozen=True)
class PPOSettings:
    """All settings of :class:`~lightning_rlhf.module.ActorCriticModule`, as one object.

    The defaults are those of ``conf/module/ppo.yaml`` with ``model=hf``, for a pre-trained instruct model.
    """

    update: UpdateSettings = field(default_factory=UpdateSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    termination: TerminationSettings = field(default_factory=TerminationSettings)
    reward_processing: RewardSettings = field(default_factory=RewardSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    kl: KLSettings = field(default_factory=KLSettings)
    actor: GroupSettings = field(default_factory=lambda: GroupSettings(lr=1e-6, warmup_iterations=2))
    critic: GroupSettings = field(default_factory=lambda: GroupSettings(lr=1e-5))
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    groups: PromptGroupSettings = field(default_factory=PromptGroupSettings)

    @property
    def groups_fault(self) -> SettingError | None:
        """What the other settings leave no room for in ``groups``; ``None`` if they fit together."""
        key, chosen, advantage = "module.groups.normalise", self.groups.normalise, self.advantage
        if chosen == "rewards" and self.reward_processing.normalise == "none":
            allowed = "none or advantages, or module.reward_processing.normalise batch or running: it is done per group"
            return SettingError(key, chosen, allowed)
        if chosen == "advantages" and not (advantage.whiten and advantage.estimator in WHITENED):
            allowed = (
                f"none or rewards, or module.advantage.whiten=true with {' or '.join(WHITENED)}: it is done per group"
            )
            return SettingError(key, chosen, allowed)
        return None

    @classmethod
    def from_blocks(cls, **blocks: Mapping[str, Any] | None) -> PPOSettings:
        """Settings from config blocks; a block that is ``None`` keeps its defaults.

        Raises:
            SettingError: an unknown key or a value out of range.
        """
        settings = cls()
        for name, block in blocks.items():
            default = getattr(settings, name)
            built = build(type(default), f"module.{name}", block, defaults=asdict(default))
            settings = replace(settings, **{name: built})
        return settings


def build(
    kind: type[_Settings],
    block: str,
    values: Mapping[str, Any] | _Settings | None,
    *,
    defaults: Mapping[str, Any] | None = None,
) -> _Settings:
    """A settings object from a config block, refusing unknown keys with the nearest spelling.

    Args:
        kind: the dataclass.
        block: dotted key of the block, for errors.
        values: the block; or an object of ``kind``, which is returned as it is.
        defaults: of keys that the block lacks; ``None``: the dataclass's own.
    """
    if isinstance(values, kind):
        return values
    if not isinstance(values, (Mapping, type(None))):
        raise SettingError(block, values, "a block of settings")
    values = {**(defaults or {}), **(values or {})}
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise SettingError(f"{block}.{name}", values[name], f"{hint}known keys: {', '.join(known)}")
    missing = [n for n, f in known.items() if f.default is MISSING and f.default_factory is MISSING and n not in values]
    if missing:
        raise SettingError(block, dict(values), f"missing: {', '.join(missing)}")
    for name, value in values.items():
        allowed = wrong_kind(value, str(known[name].type))
        if not allowed and name in NOT_BLANK and blank(value):
            allowed = "a text that is not blank"
        if allowed:
            fitting = {n: v for n, v in values.items() if n == name or not wrong_kind(v, str(known[n].type))}
            alone = {n: v for n, v in fitting.items() if n == name or known[n].default is MISSING}
            raise SettingError(f"{block}.{name}", value, _in_own_words(kind, (fitting, alone), name, allowed))
    try:
        return kind(**values)
    except SettingError as error:
        raise SettingError(error.key.replace("module.<group>", block), error.value, error.allowed) from None
    except TypeError as error:
        raise SettingError(block, dict(values), str(error)) from None


SOMETHING_TO_FIND = "a word at least, or one in patterns, or a classifier"
"""What ``module.safety`` needs."""

NOT_BLANK = {"address", "layers", "path", "reply", "revision", "text_field", "words"}
"""Texts of blocks of settings that name something, or whose words are looked for."""


def _in_own_words(kind: type[Any], tries: Sequence[Mapping[str, Any]], name: str, allowed: str) -> str:
    """What is allowed, in the words of the dataclass's own check: bounds or choices.

    Args:
        kind: the dataclass.
        tries: the value with others beside it; the first whose check reaches this key, or passes, counts.
        name: of the value.
        allowed: what its type allows, and remarks.
    """
    for values in tries:
        try:
            kind(**values)
        except SettingError as error:
            if error.key.rpartition(".")[2] != name:
                continue  # of another value, which is reported, too
            if error.allowed.startswith((allowed.partition(" (")[0], "one of")):
                return error.allowed
            if allowed.startswith(("a text", "a list of texts")):
                return "".join([error.allowed, *allowed.partition(";")[1:]])
        except (TypeError, ValueError, AttributeError, ArithmeticError):
            return allowed  # the check cannot compare a value of this type; the caller refuses it, with these words
        break
    return allowed
