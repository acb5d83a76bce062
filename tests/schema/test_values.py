"""Values that no run can use are refused at the first look, by key: huge numbers, blank texts, null for a choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_rlhf.callbacks import PromptMonitor
from lightning_rlhf.errors import SettingError
from lightning_rlhf.schema import ConfigError, check, first_look


def refused(compose: Callable[..., Any], *overrides: str, look: Callable[..., Any] = first_look) -> dict[str, str]:
    """Key -> what is allowed, of every problem, each under one key."""
    try:
        look(compose(*overrides))
    except ConfigError as error:
        assert len({problem.key for problem in error.problems}) == len(error.problems)
        return {problem.key: problem.allowed for problem in error.problems}
    return {}


HUGE = "9" * 21


def test_numbers_beyond_float32(compose):
    keys = {
        "module.kl.coefficient": "1e39",
        "module.termination.early_penalty": "-1e300",
        "module.loss.clip_high": "1e300",
        "module.loss.entropy_coefficient": "1e308",
        "model.lr.actor": "1e39",
        "rollout.temperature": "1e39",
        "callbacks.kl_early_stop.target": "1e39",
    }
    found = refused(compose, *(f"{key}={value}" for key, value in keys.items()))
    assert found.keys() == keys.keys()
    assert all("a finite number" in text and "float32 ends at 3.4e+38" in text for text in found.values())


def test_whole_numbers_beyond_64_bits(compose):
    keys = [
        "iterations",
        "evaluate_every",
        "progress_every",
        "module.termination.min_tokens",
        "module.update.minibatch_size",
        "rollout.samples",
        "rollout.top_k",
        "data.prompts_per_iteration",
        "data.train.limit",
        "data.validation_limit",
        "callbacks.prompt_monitor.min_visits",
        "callbacks.checkpoint.keep",
    ]
    data = ["data=jsonl", "data.train.path=x.jsonl", "callbacks=[default,prompt_monitor]"]
    found = refused(compose, *data, *(f"{key}={HUGE}" for key in keys))
    assert found.keys() == set(keys)
    assert all("a whole number" in text and "below 2**63" in text for text in found.values())


def test_threads_that_would_end_the_process(compose):
    assert refused(compose, "threads=1024") == {}
    assert refused(compose, "threads=1025") == {"threads": "a whole number >= 1 and <= 1024, or null"}


def test_more_visits_than_memory_holds(compose):
    assert refused(compose, "callbacks=[default,prompt_monitor]", "callbacks.prompt_monitor.window=10001") == {
        "callbacks.prompt_monitor.window": "a whole number >= 3 and <= 10000"
    }
    with pytest.raises(SettingError, match=r"callbacks\.prompt_monitor\.window = 2 .* >= 3"):
        PromptMonitor(window=2)  # without the visit farthest out one is left, which has no spread
    with pytest.raises(SettingError, match=r"callbacks\.prompt_monitor\.window = 10001 .* <= 10000"):
        PromptMonitor(window=10_001)


def test_a_number_for_a_reply_is_no_missing_reply(compose):
    replace = ["safety=filter", "module.safety.words=[a]", "module.safety.action=replace", "module.safety.reply=12"]
    assert refused(compose, *replace, look=check) == {
        "module.safety.reply": "a text, or null; 12 is a number, the text has quotes: '12'"
    }


def test_bounds_and_choices_are_told_beside_other_mistakes(compose):
    found = refused(
        compose, "module.termination.min_tokens=-1", "module.termination.early=null", "module.loss.clip_low=x"
    )
    assert found == {
        "module.termination.min_tokens": "a whole number >= 0",
        "module.termination.early": "one of keep, penalty, drop",
        "module.loss.clip_low": "a finite number > 0 and < 1",
    }


BLANK = [
    "callbacks.checkpoint.dirpath",
    "callbacks.checkpoint.monitor",
    "logger.mlflow.experiment_name",
    "logger.mlflow.tracking_uri",
    "data.prompt_field",
    "data.blacklist",
    "data.conservative",
    "data.train.path",
    "data.validation",
    "module.ptx.source",
    "callbacks.adaptive_ptx.text",
    "resume",
    "run_name",
    "output_dir",
]


@pytest.mark.parametrize("value", ['""', "'  '", "5"])
def test_blank_texts_and_numbers_in_their_place(compose, value):
    groups = ["data=jsonl", "ptx=default", "callbacks=[default,adaptive_ptx]"]
    found = refused(compose, *groups, *(f"{key}={value}" for key in BLANK))
    assert found.keys() == set(BLANK)
    assert all(words in text for text in found.values() for words in (["quotes: '5'"] if value == "5" else []))


def test_texts_that_may_be_blank(compose):
    assert refused(compose, "logger=csv", "logger.csv.name=''", "data.system_prompt=''") == {}


CHOICES = {
    "module.termination.early": "one of keep, penalty, drop",
    "module.termination.truncated": "one of keep, penalty, drop_reward, bootstrap, soft_overlong",
    "module.advantage.estimator": "one of gae, grpo, rloo, reinforce_plus_plus",
    "module.reward_processing.normalise": "one of none, batch, running",
    "module.loss.ratio_level": "one of token, sequence",
    "module.loss.aggregation": "one of token-mean,",
    "module.kl.estimator": "one of k1, k2, k3, abs",
    "module.kl.placement": "one of reward, loss",
    "module.optimizer.schedule": "one of constant, linear, cosine",
    "model.policy.critic": "one of separate, shared, none",
    "model.policy.reference": "one of copy, none",
    "model.source.dtype": "one of float32, bfloat16, float16",
    "data.train.style": "one of plain, chat",
    "data.train.split": "one of train, validation, all",
    "callbacks.checkpoint.mode": "one of min, max",
    "unsupported_precision": "replace or refuse",
}


@pytest.mark.parametrize("value", ["null", "[drop]"])
def test_choices_are_listed(compose, value):
    found = refused(compose, "data.validation=null", *(f"{key}={value}" for key in CHOICES))
    assert found.keys() == CHOICES.keys()
    assert {key: text for key, text in found.items() if not text.startswith(CHOICES[key])} == {}


@pytest.mark.parametrize("value", ["null", "[drop]"])
def test_choices_of_the_mixins_are_listed(compose, value):
    keys = ["module.alp.ratio", "module.alp.granularity", "module.safety.action"]
    keys += ["module.rollout_correction.rollout_is_mode", "module.rollout_correction.loss_type"]
    keys += ["module.rollout_correction.missing_logprobs", "module.rollout_correction.rollout_is_dtype"]
    groups = ["alp=default", "safety=filter", "rollout_correction=monitor", "module.safety.words=[x]"]
    found = refused(compose, *groups, *(f"{key}={value}" for key in keys), look=check)
    assert found.keys() == set(keys)
    assert all(text.startswith("one of ") for text in found.values()), found


def test_reward_terms_that_are_null(compose):
    assert refused(compose, "reward.terms.exact_match=null", look=check) == {}
    terms = ["reward.terms.exact_match=null", "reward.terms.characters=null"]
    assert refused(compose, *terms) == {"reward.terms": "at least one term that is not null"}
