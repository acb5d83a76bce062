"""Asynchronous rollouts: one iteration behind, no race with the update, nothing lost on resume."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from torch.utils.data import DataLoader

from lightning_rlhf.checkpoint import AtomicCheckpointIO, IterationCheckpoint, RNGState
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.rollout import Ahead, AheadRollouts, HFEngine
from tests.support import Recorder, fit, prompts, same, tiny_module, weights

CPU = torch.device("cpu")


def lagging(*, lag: int = 1, iterations: int = 4, **settings: Any) -> Any:
    """A tiny module whose engine runs ahead."""
    module = tiny_module(iterations=iterations, **settings)
    sampling = module.engine.sampling
    module.engine = HFEngine(
        temperature=sampling.temperature, samples=sampling.samples, max_new_tokens=sampling.max_new_tokens, lag=lag
    )
    return module


def rollout_of(keys: list[str], version: int = 0) -> Rollout:
    rows = len(keys)
    return Rollout(
        prompt_ids=torch.ones(rows, 2, dtype=torch.long),
        prompt_mask=torch.ones(rows, 2, dtype=torch.bool),
        response_ids=torch.ones(rows, 3, dtype=torch.long),
        response_mask=torch.ones(rows, 3, dtype=torch.bool),
        rollout_logprobs=torch.zeros(rows, 3),
        finish=torch.zeros(rows, dtype=torch.long),
        policy_version=torch.full((rows,), version),
        seed=torch.arange(rows),
        group=torch.arange(rows),
        prompt_key=keys,
    )


def batch_of(keys: list[str]) -> PromptBatch:
    return PromptBatch([[1, 1] for _ in keys], list(keys), keys, [{} for _ in keys], [0 for _ in keys])


@pytest.mark.parametrize("lag", [-1, 2, True, 0.5, "1"])
def test_only_lag_0_and_1_exist(lag: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.lag = .* is not allowed: 0 \(on-policy\) or 1"):
        HFEngine(lag=lag)


@pytest.mark.parametrize("limit", [0, -1, True, 1.5])
def test_a_limit_below_the_lag_is_refused(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"rollout\.max_staleness = .* is not allowed: an integer >= rollout\.lag = 1"):
        Ahead(lag=1, max_staleness=limit)


def test_the_rollout_goes_to_the_prompts_it_was_made_for_only() -> None:
    ahead = AheadRollouts()
    made = rollout_of(["a", "a", "b", "b"])
    ahead.begin(lambda: made, CPU)
    assert ahead.take(batch_of(["a", "b"])) is made
    assert ahead.take(batch_of(["a", "b"])) is None, "handed out once"
    ahead.begin(lambda: made, CPU)
    assert ahead.take(batch_of(["b", "a"])) is None
    ahead.close()


def test_an_error_of_the_thread_is_raised_where_the_rollout_is_awaited() -> None:
    ahead = AheadRollouts()

    def fail() -> Rollout:
        raise FloatingPointError("logits are not finite")

    ahead.begin(fail, CPU)
    with pytest.raises(FloatingPointError, match="not finite"):
        ahead.wait()
    ahead.close()


def test_a_second_rollout_ahead_is_refused() -> None:
    ahead = AheadRollouts()
    ahead.begin(lambda: rollout_of(["a"]), CPU)
    with pytest.raises(RuntimeError, match="still there"):
        ahead.begin(lambda: rollout_of(["b"]), CPU)
    ahead.close()


def test_the_thread_has_the_callers_autocast_and_no_gradient() -> None:
    seen: dict[str, Any] = {}

    def look() -> Rollout:
        seen["thread"] = threading.current_thread()
        seen["grad"] = torch.is_grad_enabled()
        seen["dtype"] = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        return rollout_of(["a"])

    ahead = AheadRollouts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ahead.begin(look, CPU)
    ahead.wait()
    ahead.close()
    assert seen["thread"] is not threading.main_thread()
    assert not seen["grad"]
    assert seen["dtype"] == torch.bfloat16


def test_lag_1_trains_on_samples_one_iteration_old_and_learns_from_their_ratio() -> None:
    module, recorder = lagging(), Recorder()
    logged: list[dict[str, float]] = []
    module.log_dict = lambda numbers, **kwargs: logged.append(dict(numbers)) if kwargs.get("logger") is False else None
    fit(module, [recorder])
    versions = [e.policy_version.unique().tolist() for e, _ in recorder.of("on_experience_ready")]
    assert versions == [[0], [0], [1], [2]], "iteration i is trained with the weights of i - 1"
    runs = [numbers for numbers in logged if "rollout/staleness_mean" in numbers]
    assert [run["rollout/staleness_mean"] for run in runs] == [0, 1, 1, 1]
    assert [run["rollout/staleness_max"] for run in runs] == [0, 1, 1, 1]
    assert [run["rollout/drawn_late"] for run in runs] == [1, 0, 0, 0]
    gaps = [
        (e.old_logprobs - e.rollout_logprobs)[e.response_mask].abs().max()
        for e, _ in recorder.of("on_experience_ready")
    ]
    assert gaps[0] < 1e-5, "the first rollout is on-policy"
    assert min(gaps[1:]) > 1e-4, "later ones come from the weights before the last update"


def test_lag_0_is_the_synchronous_engine_bit_for_bit() -> None:
    plain, explicit = tiny_module(iterations=3), lagging(lag=0, iterations=3)
    fit(plain)
    fit(explicit)
    assert same(weights(plain), weights(explicit))


def test_without_learning_the_lag_changes_no_sample() -> None:
    still = {"actor": {"lr": 1e-20}, "critic": {"lr": 1e-20}}  # below the rounding of every weight
    seen = []
    for lag in (0, 1):
        module, recorder = lagging(lag=lag, **still), Recorder()
        fit(module, [recorder])
        seen.append(recorder.of("on_rollout_end"))
    for now, ahead in zip(*seen, strict=True):
        assert torch.equal(now.response_ids, ahead.response_ids)
        # The copy of the weights lies elsewhere in memory, where a matrix product may round otherwise.
        torch.testing.assert_close(now.rollout_logprobs, ahead.rollout_logprobs, atol=1e-6, rtol=0)
        assert torch.equal(now.seed, ahead.seed)


def test_a_lagging_run_is_deterministic_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole, again, stopped, resumed = (lagging(iterations=5) for _ in range(4))
    fit(whole)
    fit(again)
    assert same(weights(whole), weights(again)), "no race between the update and the generation beside it"
    saver = IterationCheckpoint(dirpath=str(tmp_path), every_n_iterations=2)
    fit(
        stopped,
        [RNGState(), saver],
        limit_train_batches=2,
        enable_checkpointing=True,
        plugins=[AtomicCheckpointIO()],
        data=prompts(stopped, iterations=5),
    )
    [path] = sorted(tmp_path.glob("iteration_*2.ckpt"))
    [saved] = torch.load(path, weights_only=True)["lightning_rlhf"]["rollout_ahead"]
    assert saved["policy_version"].unique().tolist() == [1], "the rollout of iteration 3, drawn during iteration 2"
    recorder = Recorder()
    fit(resumed, [RNGState(), recorder], resume=path)
    versions = [e.policy_version.unique().tolist() for e, _ in recorder.of("on_experience_ready")]
    assert versions == [[1], [2], [3]]
    assert same(weights(whole), weights(resumed))


def test_a_rollout_that_is_too_stale_is_drawn_again(tmp_path: Path) -> None:
    module, recorder = lagging(iterations=3), Recorder()
    module.engine.ahead = Ahead(lag=1, max_staleness=1)
    forget = module.engine.update_weights
    # The rollout of iteration 3 is drawn with weights that were not updated after iteration 1: two iterations old.
    module.engine.update_weights = lambda version: forget(version) if version != 1 else None
    fit(module, [recorder])
    versions = [e.policy_version.unique().tolist() for e, _ in recorder.of("on_experience_ready")]
    assert versions == [[0], [0], [2]]


def test_an_engine_that_never_gets_weights_is_an_error() -> None:
    module = lagging(iterations=4, lag=0)
    module.engine.ahead = Ahead(lag=0, max_staleness=1)
    module.engine.update_weights = lambda version: None
    with pytest.raises(RuntimeError, match=r"weights 2 iterations old, which rollout\.max_staleness = 1 forbids"):
        fit(module)


def test_a_data_module_that_cannot_look_ahead_is_refused() -> None:
    class Plain(LightningDataModule):
        def train_dataloader(self) -> DataLoader:
            return DataLoader([batch_of(["a"])], batch_size=None)

    with pytest.raises(RuntimeError, match=r"rollout\.lag = 1 needs a data module with a method train_batch"):
        fit(lagging(), data=Plain())
