"""From rewards to advantages. Column ``t`` of every ``[B, R]`` tensor speaks of response token ``t``.

Advantages and returns are targets: nothing here carries a gradient. Masked tokens may hold any value and get 0.
Whitening is left to :func:`lightning_rlhf.functional.stats.whiten`, over the tokens that enter the loss. float32 and
float64 are supported; functions that sum along a row refuse float16 and bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_rlhf.functional.stats import Moments, require_float32, require_same_shape, select_valid

GROUP_STD_EPS = 1e-6


@torch.no_grad()
def token_rewards(scores: Tensor, mask: Tensor, kl: Tensor | None = None, kl_coefficient: float = 0.0) -> Tensor:
    """Reward of each token: minus the KL penalty on every valid token, plus the score on the last valid one.

    Args:
        scores: ``[B]``, one number per sequence. The score of a row without a valid token is dropped.
        mask: ``[B, R]``, true on response tokens.
        kl: ``[B, R]``, per-token estimate, see :func:`lightning_rlhf.functional.kl.kl_estimate`.
        kl_coefficient: beta; at 0 there is no penalty, even where ``kl`` is infinite.

    Returns:
        ``[B, R]``; 0 on padding, before any recursion can carry it to a valid token.
    """
    mask = mask.bool()
    require_same_shape(scores=scores, rows=mask.any(-1))
    require_float32(scores=scores, kl=kl)
    # Exactly one valid token from here on: at the last one, and in a hole just before it, which ``mask`` excludes.
    last = mask & (mask.flip(-1).cumsum(-1).flip(-1) == 1)
    rewards = select_valid(scores.unsqueeze(-1), last)
    if kl is None or kl_coefficient == 0:
        return rewards
    require_same_shape(kl=kl, mask=mask)
    return rewards + select_valid(-kl_coefficient * kl, mask)


@torch.no_grad()
def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float, bootstrap: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv 1506.02438) over the valid tokens of each row.

    ``delta_t = r_t + gamma V_next - V_t`` and ``A_t = delta_t + gamma lam A_next``, where "next" is the next **valid**
    token: masked tokens in between are skipped and not discounted.

    Args:
        rewards: ``[B, R]``, see :func:`token_rewards`.
        values: ``[B, R]``, value of the state in which token ``t`` was chosen.
        mask: ``[B, R]``, true on response tokens, before any rejection.
        gamma: discount per token.
        lam: lambda, from 0 (one-step error) to 1 (return minus value).
        bootstrap: ``[B]``, value of the state after the last valid token: the critic's for rows cut at the length
            limit, 0 for rows that ended. Without it every row counts as ended.

    Returns:
        Advantages (not whitened) and returns ``A + V``, both ``[B, R]``.
    """
    require_same_shape(rewards=rewards, values=values, mask=mask)
    require_float32(rewards=rewards, values=values, bootstrap=bootstrap)
    mask = mask.bool()
    rewards, values = select_valid(rewards, mask), select_valid(values, mask)
    after_last = values.new_zeros(values.shape[0]) if bootstrap is None else bootstrap
    require_same_shape(bootstrap=after_last, rows=mask.any(-1))
    next_values = torch.cat([values, after_last.unsqueeze(-1)], dim=-1).gather(-1, _next_valid(mask))
    deltas = select_valid(rewards + gamma * next_values - values, mask)
    decay = torch.where(mask, torch.full_like(deltas, gamma * lam), 1.0)
    advantages = select_valid(_backward_recursion(deltas, decay), mask)
    return advantages, advantages + values


@torch.no_grad()
def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each token on: ``G_t = r_t + gamma G_{t+1}``.

    The discount counts **positions**: a masked token inside a response gives no reward but is discounted. (In
    :func:`gae` it is not, as values exist at valid tokens alone.) Without such holes there is no difference.

    Args:
        rewards: ``[B, R]``.
        mask: ``[B, R]``, true on response tokens.
        gamma: discount per position.

    Returns:
        ``[B, R]``.
    """
    require_same_shape(rewards=rewards, mask=mask)
    require_float32(rewards=rewards)
    rewards = select_valid(rewards, mask)
    return select_valid(_backward_recursion(rewards, torch.full_like(rewards, gamma)), mask)


@torch.no_grad()
def grpo_advantages(scores: Tensor, group: Tensor, mask: Tensor, *, normalise_std: bool = True) -> Tensor:
    """Score minus the group's mean, over its standard deviation (GRPO, Shao et al. 2024, arXiv 2402.03300).

    Args:
        scores: ``[B]``, one number per sequence.
        group: ``[B]`` int64; samples of one prompt share a number, and lie on one rank.
        mask: ``[B, R]``, true on tokens that enter the loss. Rows without any do not count in their group.
        normalise_std: divide by the unbiased standard deviation (+ 1e-6); false is Dr. GRPO (Liu et al. 2025).

    Returns:
        ``[B, R]``: one number per row on its valid tokens; 0 in a group of one, and where the scores of a group are
        equal up to rounding: dividing would turn rounding errors into a signal.
    """
    centred, mean, size, members = _centre(scores, group, mask)
    if normalise_std:
        squares = _group_sum(centred.square(), members, len(size))
        found = Moments(mean, squares / (size - 1).clamp(min=1), size)
        scale = torch.where(found.flat(scores.dtype), 0.0, 1.0 / (found.std + GROUP_STD_EPS))
        centred = centred * scale[members]
    return _spread(centred, scores, mask)


@torch.no_grad()
def rloo_advantages(scores: Tensor, group: Tensor, mask: Tensor) -> Tensor:
    """Score minus the mean of the **other** scores of the group (RLOO, Ahmadian et al. 2024, arXiv 2402.14740).

    Arguments and result as in :func:`grpo_advantages`.
    """
    centred, _, size, members = _centre(scores, group, mask)
    # s - (sum - s) / (n - 1) = (s - mean) * n / (n - 1)
    return _spread(centred * (size / (size - 1).clamp(min=1))[members], scores, mask)


@torch.no_grad()
def reinforce_plus_plus_advantages(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Discounted rewards-to-go ``[B, R]``, to be whitened over the batch (REINFORCE++, Hu 2025, arXiv 2501.03262)."""
    return rewards_to_go(rewards, mask, gamma=gamma)


@torch.no_grad()
def remax_advantages(rewards: Tensor, baselines: Tensor, mask: Tensor) -> Tensor:
    """Rewards-to-go minus the reward of the greedy answer (ReMax, Li et al. 2023, arXiv 2310.10505).

    Args:
        rewards: ``[B, R]``.
        baselines: ``[B]``, reward of the greedy answer to each row's prompt.
        mask: ``[B, R]``, true on response tokens.

    Returns:
        ``[B, R]``.
    """
    require_same_shape(baselines=baselines, rows=mask.any(-1))
    return select_valid(rewards_to_go(rewards, mask, gamma=1.0) - baselines.unsqueeze(-1), mask)


def _next_valid(mask: Tensor) -> Tensor:
    """``[B, R]`` column of the next valid token after each column; R where there is none."""
    rows, columns = mask.shape
    index = torch.arange(columns + 1, device=mask.device).expand(rows, -1)
    ahead = torch.where(torch.cat([mask, mask.new_ones(rows, 1)], dim=-1), index, columns)
    return ahead.flip(-1).cummin(-1).values.flip(-1)[:, 1:]


def _backward_recursion(terms: Tensor, decay: Tensor) -> Tensor:
    """``x_t = terms_t + decay_t x_{t+1}`` along the last dimension, for all rows at once."""
    running = terms.new_zeros(terms.shape[0])
    columns = []
    for term, factor in zip(reversed(terms.unbind(1)), reversed(decay.unbind(1)), strict=True):
        running = torch.addcmul(term, factor, running)
        columns.append(running)
    return torch.stack(columns[::-1], dim=1) if columns else terms


def _centre(scores: Tensor, group: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores minus group mean ``[B]`` (0 for rows that take no part), means and sizes ``[G]``, each row's group."""
    require_same_shape(scores=scores, group=group, rows=mask.any(-1))
    rows = mask.bool().any(-1)
    unique, members = group.unique(return_inverse=True)
    size = _group_sum(rows.double(), members, len(unique))
    valid = select_valid(scores.double(), rows)
    mean = _group_sum(valid, members, len(unique)) / size.clamp(min=1)
    return select_valid(valid - mean[members], rows), mean, size, members


def _group_sum(x: Tensor, members: Tensor, groups: int) -> Tensor:
    return x.new_zeros(groups).index_add(0, members, x)


def _spread(advantages: Tensor, scores: Tensor, mask: Tensor) -> Tensor:
    """Give each row's number to its valid tokens, in the dtype of the scores."""
    return select_valid(advantages.to(scores.dtype).unsqueeze(-1), mask)
