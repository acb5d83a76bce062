"""Lists of prompts: read with errors that name file and line, and respected by the next run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf import schema
from lightning_rlhf.data import DataError, PromptDataModule
from lightning_rlhf.data.lists import read_list
from lightning_rlhf.errors import ConfigError, SettingError
from lightning_rlhf.experience import prompt_key
from tests.support import Recorder, fit, same, tiny_module, weights

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(8)]
KEYS = [prompt_key(row["prompt"]) for row in ROWS]
UNKNOWN = "0123456789abcdef"


def written(folder: Path, text: str) -> str:
    path = folder / "list.txt"
    path.write_text(text, encoding="utf-8")
    return str(path)


def data(module: Any, **settings: Any) -> PromptDataModule:
    sizes = {"prompts_per_iteration": 8, "iterations": module.iterations} | settings
    return PromptDataModule(ROWS, tokenizer=module.tokenizer, **sizes)


def test_a_list_has_keys_comments_and_factors(tmp_path: Path) -> None:
    path = written(tmp_path, f"# a comment\n\n{KEYS[0]}\n{KEYS[1]}  3.5 # hard: 1+1=\n")
    assert read_list(path, "data.conservative", factor=2.0) == {KEYS[0]: 2.0, KEYS[1]: 3.5}
    assert read_list(written(tmp_path, f"{KEYS[0]} # bad\n"), "data.blacklist") == {KEYS[0]: 1.0}


@pytest.mark.parametrize(
    ("line", "factor", "said"),
    [
        ("12+34=", None, "'12+34=' is no prompt key; allowed are 16 hexadecimal digits"),
        (f"{UNKNOWN} 2", None, "'2' is not allowed after the key; allowed is one key a line"),
        (f"{UNKNOWN} 2 3", 2.0, "'2 3' is not allowed after the key; allowed is a key and a factor a line"),
        (f"{UNKNOWN} much", 2.0, "factor 'much' is not allowed: a finite number >= 1"),
        (f"{UNKNOWN} 0.5", 2.0, "factor '0.5' is not allowed"),
        (f"{UNKNOWN} inf", 2.0, "factor 'inf' is not allowed"),
    ],
)
def test_a_line_that_is_no_entry_is_refused_with_its_place(tmp_path: Path, line: str, factor: Any, said: str) -> None:
    path = written(tmp_path, f"{KEYS[0]}\n{line}\n")
    with pytest.raises(DataError) as error:
        read_list(path, "data.blacklist", factor=factor)
    assert f"data.blacklist: {path}:2: " in str(error.value) and said in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.blacklist = 'no\.txt' cannot be read .*one prompt key a line"):
        read_list("no.txt", "data.blacklist")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read"):
        read_list(tmp_path / "binary", "data.blacklist")


def test_blacklisted_prompts_are_not_drawn_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    module, recorder = tiny_module(iterations=2), Recorder()
    given = data(module, prompts_per_iteration=6, blacklist=written(tmp_path, f"{KEYS[2]}\n{KEYS[5]}\n{UNKNOWN}\n"))
    with caplog.at_level(logging.WARNING):
        trainer = fit(module, [recorder], data=given)
    drawn = {key for rollout in recorder.of("on_rollout_end") for key in rollout.prompt_key}
    assert drawn == set(KEYS) - {KEYS[2], KEYS[5]}
    assert trainer.callback_metrics["data/prompts_blacklisted"] == 2
    assert "data.blacklist: 2 of 8 training rows are left out" in caplog.text
    assert f"data.blacklist: 1 of 3 keys name no training prompt: {UNKNOWN}" in caplog.text


def test_the_held_out_prompts_stay_as_they_are(tmp_path: Path) -> None:
    module = tiny_module()
    before = data(module, validation_size=3)
    path = written(
        tmp_path, "\n".join(prompt.key for prompt in before.validation_prompts[:1] + before.train_prompts[:1])
    )
    after = data(module, validation_size=3, blacklist=path)
    assert [p.key for p in after.validation_prompts] == [p.key for p in before.validation_prompts]
    assert [p.key for p in after.train_prompts] == [p.key for p in before.train_prompts[1:]]


def test_a_blacklist_of_everything_is_refused(tmp_path: Path) -> None:
    given = data(tiny_module(), blacklist=written(tmp_path, "\n".join(KEYS)))
    with pytest.raises(DataError, match=r"data\.blacklist leaves no training prompt: it names all 8 rows"):
        given.setup("fit")


def test_conservative_prompts_pay_more_for_their_kl(tmp_path: Path) -> None:
    """Rows of prompt 1 have twice the penalty, those of prompt 2 five times, in rewards, returns and metrics."""
    path = written(tmp_path, f"{KEYS[1]}\n{KEYS[2]} 5\n")
    kl = {"kl": {"coefficient": 0.5}, "advantage": {"gae_lambda": 1.0, "whiten": False}}
    runs = []
    for conservative in (None, path):
        module, recorder = tiny_module(iterations=2, **kl), Recorder()
        trainer = fit(module, [recorder], data=data(module, conservative=conservative))
        runs.append((recorder.of("on_experience_ready"), trainer.callback_metrics))
    (plain, _), (scaled, metrics) = runs
    assert plain[0][0].kl_scale is None and metrics["data/prompts_conservative"] == 2
    second = scaled[1][0]  # in the first iteration policy and reference are equal
    factors = torch.tensor([{KEYS[1]: 2.0, KEYS[2]: 5.0}.get(key, 1.0) for key in second.prompt_key])
    assert torch.equal(second.kl_scale, factors)
    penalty = 0.5 * factors.unsqueeze(-1) * (second.old_logprobs - second.ref_logprobs) * second.response_mask
    to_go = (second.scores.unsqueeze(-1) - penalty.flip(-1).cumsum(-1).flip(-1)) * second.response_mask
    assert penalty.abs().max() > 1e-3
    torch.testing.assert_close(second.returns, to_go, rtol=1e-4, atol=1e-6)
    assert float(metrics["kl/reward_penalty"]) == pytest.approx(-float(penalty.sum(-1).mean()), rel=1e-4)
    measured = ((second.old_logprobs - second.ref_logprobs) * second.response_mask).sum() / second.response_mask.sum()
    assert float(metrics["kl/ref"]) == pytest.approx(float(measured), rel=1e-4), "the KL itself is measured as it is"


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_the_factor_changes_the_update_wherever_the_penalty_is(tmp_path: Path, placement: str) -> None:
    """A factor of 1 for every prompt changes no bit; a larger one changes the weights."""
    kl = {"coefficient": 0.5, "placement": placement, "estimator": "k3"}
    trained = []
    for text in (None, "\n".join(f"{key} 1" for key in KEYS), "\n".join(f"{key} 4" for key in KEYS)):
        module = tiny_module(iterations=2, kl=kl)
        fit(module, data=data(module, conservative=None if text is None else written(tmp_path, text)))
        trained.append(weights(module))
    assert same(trained[0], trained[1]) and not same(trained[0], trained[2])


def test_a_resume_with_another_conservative_list_is_told(tmp_path: Path) -> None:
    module = tiny_module()
    states = []
    for text in (KEYS[0], KEYS[0], KEYS[1], f"{KEYS[0]} 3"):
        given = data(module, conservative=written(tmp_path, text))
        given.setup("fit")
        states.append(given)
    first, same_list, *others = states
    same_list.load_state_dict(first.state_dict())
    for other in others:
        with pytest.raises(
            DataError, match=r"other prompts in data\.conservative, or other factors.*resume_on_other_data"
        ):
            other.load_state_dict(first.state_dict())


@pytest.mark.parametrize("value", [0.5, 0, None, True])
def test_a_factor_below_one_is_refused(value: Any) -> None:
    with pytest.raises(SettingError, match=r"data\.conservative_beta = .* is not allowed: a finite number >= 1"):
        data(tiny_module(), conservative_beta=value)


def test_a_list_without_a_penalty_to_multiply_is_refused(compose: Any, tmp_path: Path) -> None:
    path = written(tmp_path, KEYS[0])
    with pytest.raises(ConfigError, match=r"data\.conservative.*\n.*null with module\.kl\.coefficient = 0"):
        schema.check(compose(f"data.conservative={path}", "module.kl.coefficient=0"))
    assert schema.check(compose(f"data.conservative={path}"))["data"]["conservative"] == path


def test_a_key_with_two_factors_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = written(tmp_path, f"{KEYS[0]} 3\n{KEYS[1]}\n# twice\n{KEYS[0]}\n")
    with pytest.raises(DataError, match=rf":4: {KEYS[0]} has the factor 2 here and 3 in line 1; allowed is one"):
        read_list(path, "data.conservative", factor=2.0)
    path = written(tmp_path, f"{KEYS[0]} 2\n{KEYS[0]}\n{KEYS[0]} 2.0\n")
    assert read_list(path, "data.conservative", factor=2.0) == {KEYS[0]: 2.0}


def test_a_factor_beyond_float32_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="factor '1e39' is not allowed"):
        read_list(written(tmp_path, f"{KEYS[0]} 1e39"), "data.conservative", factor=2.0)
