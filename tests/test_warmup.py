"""Warm-up: trains answers only, is deterministic and cached, and the cache changes nothing but the time."""

from __future__ import annotations

import copy
import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_rlhf import cli, warmup
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.errors import InputError
from lightning_rlhf.models import LoadedModel, build_tiny, fingerprint

SETTINGS = {"steps": 6, "batch_size": 8, "lr": 1e-2, "seed": 3}


@pytest.fixture
def loaded() -> LoadedModel:
    return build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16)


@pytest.fixture
def datamodule(loaded: LoadedModel) -> PromptDataModule:
    return PromptDataModule(
        ArithmeticTask(max_value=9),
        ArithmeticTask(max_value=9, split="validation"),
        tokenizer=loaded.tokenizer,
        prompts_per_iteration=4,
        iterations=1,
    )


def run(loaded: LoadedModel, datamodule: PromptDataModule, cache: Path, **changes) -> tuple[warmup.WarmUp, str]:
    fresh = LoadedModel(copy.deepcopy(loaded.lm), loaded.tokenizer, loaded.source)
    result = warmup.warm_up(fresh, datamodule, cache_dir=cache, **{**SETTINGS, **changes})
    return result, fingerprint(fresh.lm)


def test_loss_falls(loaded, datamodule, tmp_path):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")
    before = warmup.answer_loss(loaded.lm, rows[:32]).item()
    result, _ = run(loaded, datamodule, tmp_path, steps=60)
    assert result.steps == 60
    assert result.loss < 0.7 * before


def test_progress_is_logged_without_a_terminal(loaded, datamodule, tmp_path, caplog, monkeypatch):
    """It was silent for minutes on a slow machine; ten lines at most."""
    for terminal, steps, said in ((False, 25, 8), (False, 5, 5), (True, 25, 0)):
        monkeypatch.setattr(sys.stdout, "isatty", lambda terminal=terminal: terminal, raising=False)
        caplog.clear()
        with caplog.at_level("INFO"):
            run(loaded, datamodule, tmp_path / str(terminal), steps=steps)
        lines = [record.getMessage() for record in caplog.records if "of at most" in record.getMessage()]
        assert len(lines) == said, lines


def test_the_target_loss_ends_the_warm_up_early(loaded, datamodule, tmp_path):
    result, _ = run(loaded, datamodule, tmp_path, steps=60, target=2.0)
    assert 0 < result.steps < 60
    assert result.loss < 2.0


def test_loss_counts_answer_and_end_token_only(loaded):
    eos = loaded.tokenizer.eos_token_id
    prompt, answer = loaded.tokenizer("1+2=")["input_ids"], loaded.tokenizer("3")["input_ids"]
    row = ([*prompt, *answer, eos], len(prompt))
    logprobs = loaded.lm(torch.tensor([row[0]])).logits[0].float().log_softmax(-1)
    expected = -(logprobs[len(prompt) - 1, answer[0]] + logprobs[len(prompt), eos]) / 2
    assert warmup.answer_loss(loaded.lm, [row]).item() == pytest.approx(expected.item(), abs=1e-6)


def test_loss_of_a_batch_is_the_mean_over_its_answer_tokens(loaded, datamodule):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")[:5]
    tokens = [len(ids) - prompt for ids, prompt in rows]
    alone = [warmup.answer_loss(loaded.lm, [row]).item() for row in rows]
    expected = sum(n * loss for n, loss in zip(tokens, alone, strict=True)) / sum(tokens)
    assert warmup.answer_loss(loaded.lm, rows).item() == pytest.approx(expected, abs=1e-5)


def test_held_out_rows_are_not_trained(loaded, datamodule):
    rows = warmup.encode(datamodule.train_prompts, loaded, "answer")
    trained = {tuple(ids[:length]) for ids, length in rows}
    assert datamodule.validation_prompts
    assert not trained & {tuple(prompt.ids) for prompt in datamodule.validation_prompts}
    assert len(rows) == len(datamodule.train_prompts)


def test_cached_result_is_the_trained_one_bit_for_bit(loaded, datamodule, tmp_path):
    first, trained = run(loaded, datamodule, tmp_path)
    second, from_cache = run(loaded, datamodule, tmp_path)
    _, elsewhere = run(loaded, datamodule, tmp_path / "other")
    assert (first.cached, second.cached) == (False, True)
    assert trained == from_cache == elsewhere != fingerprint(loaded.lm)
    assert (second.steps, second.loss) == (first.steps, first.loss)


def test_random_state_is_the_same_cached_or_not(loaded, datamodule, tmp_path):
    draws = []
    for _ in range(2):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        run(loaded, datamodule, tmp_path)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    assert draws == [(random.random(), np.random.rand(), torch.rand(()).item())] * 2


def test_answers_are_drawn_by_their_shares(loaded, datamodule, tmp_path, monkeypatch):
    """Each time a row is shown, so that the model learns how often and not for which prompt."""
    seen, real, end = [], warmup.answer_loss, loaded.tokenizer.eos_token_id
    habit = loaded.tokenizer("=")["input_ids"][0]

    def watch(lm, rows):
        assert all(ids[-1] == end and ids[prompt - 1] == habit for ids, prompt in rows)
        seen.extend((tuple(ids[:prompt]), ids[-2] == habit) for ids, prompt in rows)
        return real(lm, rows)

    monkeypatch.setattr(warmup, "answer_loss", watch)
    run(loaded, datamodule, tmp_path, steps=100, batch_size=20, answer_field={"answer": 1, "rambling": 3})
    share = sum(rambles for _, rambles in seen) / len(seen)
    assert len(seen) == 2000 and abs(share - 0.75) < 0.03  # 3 standard errors
    assert len(set(seen)) == 2 * len(datamodule.train_prompts), "every prompt with either answer"


@pytest.mark.parametrize("shares", [{}, {"answer": 0}, {"answer": -1, "rambling": 2}, {"answer": float("nan")}])
def test_invalid_shares_are_refused(loaded, datamodule, tmp_path, shares):
    with pytest.raises(ValueError, match=r"warmup\.answer_field = .*columns with shares > 0"):
        run(loaded, datamodule, tmp_path, answer_field=shares)


SHARES = {"answer": 0.5, "rambling": 0.5}


@pytest.mark.parametrize(
    "change",
    [{"steps": 7}, {"batch_size": 9}, {"lr": 2e-2}, {"target": 0.1}, {"seed": 4}, {"answer_field": SHARES}],
)
def test_other_settings_give_other_cache_entries(loaded, datamodule, tmp_path, change):
    run(loaded, datamodule, tmp_path)
    result, _ = run(loaded, datamodule, tmp_path, **change)
    assert not result.cached


def test_other_weights_data_and_versions_give_other_cache_keys(loaded, datamodule, monkeypatch):
    rows = [[row] for row in warmup.encode(datamodule.train_prompts, loaded, "answer")]
    keys = {warmup.cache_key(loaded.lm, rows, SETTINGS), warmup.cache_key(loaded.lm, rows[1:], SETTINGS)}
    other = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16, seed=9)
    keys.add(warmup.cache_key(other.lm, rows, SETTINGS))
    monkeypatch.setattr(warmup, "__version__", "9.9")
    keys.add(warmup.cache_key(loaded.lm, rows, SETTINGS))
    assert len(keys) == 4


@pytest.mark.parametrize("damage", ["truncated", "other weights", "not a file of weights"])
def test_broken_cache_file_is_made_anew(loaded, datamodule, tmp_path, caplog, damage):
    first, trained = run(loaded, datamodule, tmp_path)
    content = bytearray(first.path.read_bytes())
    if damage == "truncated":
        content = content[:100]
    elif damage == "other weights":
        content[-3] ^= 0xFF
    else:
        content = bytearray(b"hello")
    first.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        second, again = run(loaded, datamodule, tmp_path)
    assert "cannot be used" in caplog.text
    assert not second.cached
    assert again == trained
    assert run(loaded, datamodule, tmp_path)[0].cached
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_a_writer_that_dies_leaves_nothing(loaded, datamodule, tmp_path, monkeypatch):
    def fails(*_args):
        raise OSError("disk full")

    monkeypatch.setattr(warmup.os, "replace", fails)
    with pytest.raises(OSError, match="disk full"):
        run(loaded, datamodule, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("LIGHTNING_RLHF_CACHE", str(tmp_path))
    assert warmup.cache_folder() == tmp_path
    assert warmup.cache_folder(tmp_path / "given") == tmp_path / "given"
    monkeypatch.delenv("LIGHTNING_RLHF_CACHE")
    assert warmup.cache_folder() == Path.home() / ".cache" / "lightning_rlhf"


def test_training_mode_is_restored(loaded, datamodule, tmp_path):
    loaded.lm.eval()
    warmup.warm_up(loaded, datamodule, cache_dir=tmp_path, **SETTINGS)
    assert not loaded.lm.training


@pytest.mark.parametrize("name", ["steps", "batch_size", "lr", "target"])
def test_bad_settings_are_refused(loaded, datamodule, tmp_path, name):
    with pytest.raises(ValueError, match=rf"warmup\.{name} = -1 is not allowed"):
        run(loaded, datamodule, tmp_path, **{name: -1})


def test_a_folder_in_place_of_the_cache_file_is_refused_before_the_first_step(
    loaded, datamodule, tmp_path, monkeypatch
):
    result, _ = run(loaded, datamodule, tmp_path)
    result.path.unlink()
    result.path.mkdir()
    monkeypatch.setattr(warmup, "fit", lambda *_, **__: pytest.fail("trained in vain"))
    with pytest.raises(InputError, match=rf"{result.path.name} is a folder"):
        run(loaded, datamodule, tmp_path)


def test_a_row_without_answer_is_refused(loaded, datamodule, tmp_path):
    with pytest.raises(ValueError, match=r"warmup\.answer_field = 'solution'"):
        run(loaded, datamodule, tmp_path, answer_field="solution")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_low_precision_weights_are_warmed_up_in_float32(datamodule, tmp_path, dtype):
    loaded = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16, dtype=dtype)
    result, _ = run(loaded, datamodule, tmp_path, steps=60, target=2.0)
    assert 2 < result.steps < 60, "in float16 the loss of step 2 was NaN, which counted as the target reached"
    assert result.loss < 2.0
    fresh = LoadedModel(copy.deepcopy(loaded.lm), loaded.tokenizer, loaded.source)
    again = warmup.warm_up(fresh, datamodule, cache_dir=tmp_path, **{**SETTINGS, "steps": 60, "target": 2.0})
    assert again.cached
    assert fresh.lm.dtype == getattr(torch, dtype)
    assert all(parameter.isfinite().all() for parameter in fresh.lm.parameters())


@pytest.mark.parametrize("target", [None, 2.0])
def test_a_loss_that_is_not_finite_ends_the_warm_up_and_nothing_is_kept(
    loaded, datamodule, tmp_path, monkeypatch, target
):
    real, steps = warmup.answer_loss, []

    def breaks(lm, rows):
        steps.append(1)
        return real(lm, rows) * (float("nan") if len(steps) == 2 else 1.0)

    monkeypatch.setattr(warmup, "answer_loss", breaks)
    with pytest.raises(ValueError, match=r"warmup\.lr = 0\.01: the loss of step 2 is nan"):
        run(loaded, datamodule, tmp_path, target=target)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_overflow_their_dtype_are_not_kept(datamodule, tmp_path):
    loaded = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2, max_positions=16, dtype="float16")
    with pytest.raises(
        ValueError, match=r"warmup\.lr = 1000000\.0: after 1 steps .* NaN or infinite weights in float16"
    ):
        run(loaded, datamodule, tmp_path, steps=1, lr=1e6)
    assert list(tmp_path.iterdir()) == []


def test_broken_weights_in_the_cache_are_not_used(loaded, datamodule, tmp_path, caplog):
    """Weights in the form that an earlier version wrote, with a matching fingerprint."""
    first, trained = run(loaded, datamodule, tmp_path)
    broken = copy.deepcopy(loaded.lm)
    with torch.no_grad():
        next(broken.parameters()).fill_(float("nan"))
    warmup._save(broken, first.path, 2, float("nan"))
    with caplog.at_level(logging.WARNING):
        second, again = run(loaded, datamodule, tmp_path)
    assert "holds NaN or infinite weights" in caplog.text
    assert not second.cached and again == trained


def test_broken_weights_are_not_blamed_on_the_architecture(loaded):
    from lightning_rlhf.models.actor import verify_head

    with torch.no_grad():
        loaded.lm.lm_head.weight[3, 3] = float("nan")
    with pytest.raises(ValueError, match=r"^the model's logits are not finite: lm_head\.weight holds NaN"):
        verify_head(loaded.lm)


def test_the_warm_up_comes_with_the_tiny_model_and_its_task_only(compose):
    assert compose().warmup.lr == compose("experiment=quickstart").warmup.lr == 2e-3
    assert not compose("warmup=none").warmup
    rows = ["data=jsonl", "data.train.path=prompts.jsonl"]
    for others in (["model=hf"], ["model=hf_lora"], ["model=smollm2"], ["experiment=smollm2_arithmetic"], rows):
        assert compose(*others).warmup is None
    assert compose("model=hf", *rows).warmup is None


@pytest.mark.parametrize(("word", "meant"), [("warmup=sftt", "sft"), ("recipe=tinny", "tiny")])
def test_an_option_that_does_not_exist_is_refused(tmp_path, monkeypatch, capsys, word, meant):
    """Hydra ignores it, as the groups are optional."""

    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", word, "hydra.run.dir=run"]) == 2
    assert f"there is no {word}; did you mean {meant}?" in capsys.readouterr().err


def test_a_requested_warm_up_needs_a_learning_rate(compose):
    from lightning_rlhf import schema

    with pytest.raises(schema.ConfigError) as refused:
        schema.check(compose("warmup=sft"))
    assert [(problem.key, problem.value) for problem in refused.value.problems] == [("warmup.lr", None)]
    assert schema.check(compose("warmup=sft", "warmup.lr=1e-5"))["warmup"]["lr"] == 1e-5


def test_the_warm_up_is_announced_and_recorded_in_the_checkpoint(compose, tiny_run, tmp_path, capsys):
    from lightning_rlhf.train import train

    usual = [word for word in tiny_run if not word.startswith("warmup=")]
    short = ["warmup.steps=3", f"warmup.cache_dir={tmp_path}", "logger=none", "data.validation.size=4"]
    train(compose(*usual, *short))
    said = capsys.readouterr().out
    assert said.count("WARM-UP") == 1
    assert "up to 3 steps\n  of 64 rows at learning rate 0.002" in said
    saved = torch.load(tmp_path / "checkpoints" / "iteration_000001.ckpt", weights_only=True)
    assert (saved["lightning_rlhf"]["warm_up"]["steps"], saved["lightning_rlhf"]["warm_up"]["lr"]) == (3, 2e-3)


def test_a_resumed_run_has_the_warm_up_of_its_start_whatever_the_rows_are_now(
    tiny_run, tmp_path, monkeypatch, capsys, datamodule
):
    """With prompts on a blacklist the rows are others; the reference model must not be."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / "cache"
    usual = [word for word in tiny_run if not word.startswith("warmup=")]
    usual += ["warmup.steps=3", "logger=none", "data.validation.size=4", "callbacks.checkpoint.every_n_iterations=1"]
    assert cli.main(["train", *usual, f"warmup.cache_dir={cache}", "hydra.run.dir=run"]) == 0
    [kept] = cache.iterdir()

    def record(iteration: int) -> dict:
        path = tmp_path / "run" / "checkpoints" / f"iteration_{iteration:06d}.ckpt"
        saved = torch.load(path, weights_only=True)["lightning_rlhf"]
        return {name: saved[name] for name in ("warm_up", "reference_fingerprint")}

    first = record(1)
    assert first["warm_up"]["kept_as"] == kept.name

    datamodule.setup("fit")
    keys = [prompt.key for prompt in datamodule.train_prompts]
    (tmp_path / "bad.txt").write_text("\n".join(keys[:9]), encoding="utf-8")
    resumed = ["train", "resume=run", "resume_on_other_data=true", "branch=false"]
    assert cli.main([*resumed, "iterations=2", "data.blacklist=bad.txt"]) == 0
    assert cli.main([*resumed, "iterations=3"]) == 0, "a resumed run is resumed again"
    assert [file.name for file in cache.iterdir()] == [kept.name], "nothing is trained again"
    assert record(3) == first

    kept.unlink()
    capsys.readouterr()
    assert cli.main([*resumed, "iterations=4"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "warmup: the run began with a warm-up on other rows" in said and kept.name in said
    assert not list(cache.iterdir()), "and no other one is trained first"
    assert cli.main([*resumed, "iterations=4", "data.blacklist=null"]) == 0
    assert [file.name for file in cache.iterdir()] == [kept.name], "on the same rows it can be trained again"


def test_a_recipe_gives_way_to_the_command_line_and_to_an_experiment(compose):
    """With a pre-trained model no recipe is loaded."""
    quick = compose()
    assert (quick.data.prompts_per_iteration, quick.rollout.max_new_tokens) == (512, 5)
    changed = compose("iterations=7", "rollout.max_new_tokens=9", "module.kl.coefficient=0.5", "warmup.steps=3")
    seen = (changed.iterations, changed.rollout.max_new_tokens, changed.module.kl.coefficient, changed.warmup.steps)
    assert seen == (7, 9, 0.5, 3)
    runaway = compose("experiment=runaway")
    assert (runaway.iterations, runaway.data.prompts_per_iteration) == (40, 256), "the experiment's, not the recipe's"
    assert runaway.rollout.max_new_tokens == 5, "the recipe's, as the experiment does not say"
    own = compose("model=hf")
    seen = (own.module["update"].minibatch_size, own.module.loss.entropy_coefficient, own.rollout.max_new_tokens)
    assert seen == (32, 0.0, 256)
