"""Good answers that are kept: which, for which prompt, and that they train nothing and survive a kill."""

from __future__ import annotations

import io
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf import schema
from lightning_rlhf.callbacks import RLHFCallback, SamplesTable
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState, latest_valid
from lightning_rlhf.data import PromptDataModule
from lightning_rlhf.data.tasks import ArithmeticTask
from lightning_rlhf.errors import ConfigError, SettingError
from lightning_rlhf.experience import Experience, Finish, Rollout, Safety
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.rewards.answers import WINDOW, AnswerCache, pairs_of
from lightning_rlhf.rewards.safety import SafetyFilter
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.screening import screened
from tests.ranks import run_ranks
from tests.support import Dies, Recorder, fit, same, tiny_module, weights

WORDS = {"words": ["1", "3", "5", "7", "9"], "action": "replace", "reply": "4+4"}
"""The untrained model writes a lone odd digit now and then."""


def experience(
    *rows: tuple[str, str, float],
    safety: Sequence[int] | None = None,
    finish: Sequence[int] | None = None,
    pad: int = 0,
) -> Experience:
    """Rows of prompt, response and score, a character a token and the prompt as its key; ``pad`` more columns."""
    count, width = len(rows), pad + max(max(len(prompt), len(response)) for prompt, response, _ in rows)
    ids = {name: torch.zeros(count, width, dtype=torch.long) for name in ("prompt", "response")}
    mask = {name: torch.zeros(count, width, dtype=torch.bool) for name in ids}
    for i, (prompt, response, _) in enumerate(rows):
        ids["prompt"][i, width - len(prompt) :] = torch.tensor([ord(letter) for letter in prompt])
        mask["prompt"][i, width - len(prompt) :] = True
        ids["response"][i, : len(response)] = torch.tensor([ord(letter) for letter in response])
        mask["response"][i, : len(response)] = True
    return Experience(
        prompt_ids=ids["prompt"],
        prompt_mask=mask["prompt"],
        response_ids=ids["response"],
        response_mask=mask["response"],
        rollout_logprobs=torch.zeros(count, width),
        finish=torch.tensor(finish or [int(Finish.NATURAL)] * count),
        policy_version=torch.zeros(count, dtype=torch.long),
        seed=torch.arange(count),
        group=torch.arange(count),
        prompt_key=[prompt for prompt, _, _ in rows],
        safety=torch.tensor(safety or [int(Safety.SAFE)] * count),
        scores=torch.tensor([score for _, _, score in rows]),
        loss_mask=mask["response"],
    )


def cache(*iterations: Experience, size: int = 9, similarity: float = 0.5) -> AnswerCache:
    made = AnswerCache(size, similarity)
    for each in iterations:
        made.remember(each)
    return made


def found(kept: AnswerCache, *asked: str, longest: int = 99) -> list[str | None]:
    """The answers that are found for some prompts, as texts."""
    rows = experience(*((prompt, "bad", 0.0) for prompt in asked))
    answers = kept.for_rows(rows, longest)
    return [None if ids is None else "".join(map(chr, ids.tolist())) for ids in answers]


# --- which answer is taken ---------------------------------------------------------------------------------------


def test_the_same_prompt_comes_first_with_its_best_answer_and_the_newest_of_equal_ones() -> None:
    kept = cache(
        experience(("abcd", "low", 1.0), ("abcd", "best", 3.0), ("abcx", "other", 9.0)),
        experience(("abcd", "later", 2.0), ("zz", "z", 0.0)),
    )
    assert found(kept, "abcd", "abcx") == ["best", "other"]
    kept.remember(experience(("abcd", "newer", 3.0)))
    assert found(kept, "abcd") == ["newer"]


def test_the_most_similar_prompt_comes_next_and_nothing_that_is_too_far() -> None:
    """Pairs of ``abcdx``: ^a ab bc cd dx. It has 4 of 6 in common with abcdy, and 2 of 8 with abqrs."""
    rows = experience(("abcdy", "near", 1.0), ("abqrs", "far", 1.0), ("zzzz", "none", 1.0))
    for similarity, expected in ((0.25, "near"), (4 / 6, "near"), (4 / 6 + 1e-9, None)):
        assert found(cache(rows, similarity=similarity), "abcdx") == [expected]
    assert found(cache(rows, similarity=0.01), "abqxx", "....") == ["far", None]
    assert found(cache(similarity=0.01), "abcdx") == [None], "nothing is kept yet"


def test_of_equally_similar_prompts_the_better_answer_is_taken_and_of_equal_scores_the_newest() -> None:
    rows = [("abcd1", "one", 2.0), ("abcd2", "two", 3.0), ("abcd3", "three", 3.0), ("zzzz", "none", 9.0)]
    low = [(name, "none", 0.0) for name in "lows"]
    assert found(cache(experience(*rows, *low)), "abcdx") == ["three"]
    assert found(cache(experience(*reversed(rows), *low)), "abcdx") == ["two"]


def test_what_all_prompts_share_does_not_make_them_similar() -> None:
    """As the text of a chat template, which is longer than many a question."""
    template = "<system>You are a careful assistant.<user>{}<assistant>"
    rows = [(template.format(text), text, 1.0) for text in ("12 and 34", "colours of the sea")]
    kept = cache(experience(*rows))
    assert found(kept, template.format("12 and 35")) == ["12 and 34"]
    assert found(kept, template.format("a poem")) == [None]
    assert found(cache(experience(rows[0])), template.format("12 and 35")) == [None], "one prompt tells nothing"
    assert found(cache(experience(rows[0])), rows[0][0]) == ["12 and 34"], "but it is known again"


def test_pairs_are_of_neighbours_in_order_and_the_first_token_counts() -> None:
    assert pairs_of(torch.tensor([5, 6, 5, 6])).tolist() == [5, (6 << 32) + 6, (7 << 32) + 5]
    assert pairs_of(torch.tensor([6])).tolist() == [6]
    assert not set(pairs_of(torch.tensor([1, 2])).tolist()) & set(pairs_of(torch.tensor([2, 1])).tolist())
    assert len(set(pairs_of(torch.tensor([0, 0, 2**31 - 1])).tolist())) == 3


def test_answers_longer_than_the_limit_are_left_out() -> None:
    kept = cache(experience(("abcd", "12345", 2.0), ("abce", "123", 2.0), ("zz", "1", 2.0)))
    assert found(kept, "abcd", longest=5) == ["12345"]
    assert found(kept, "abcd", longest=4) == ["123"], "of the next prompt, then"
    assert found(kept, "abcd", longest=2) == [None]


# --- what is kept ------------------------------------------------------------------------------------------------


def keys(kept: AnswerCache) -> list[str]:
    return kept.state_dict()["keys"]


def test_only_the_policys_own_safe_answers_that_ended_by_themselves_are_kept() -> None:
    prompts = ["safe", "redrawn", "unsafe", "reply", "cached", "early", "cut", "nan"]
    safety = [0, int(Safety.REDRAWN), int(Safety.UNSAFE), int(Safety.REPLACED), int(Safety.CACHED), 0, 0, 0]
    finish = [0, 0, 0, 0, 0, int(Finish.EARLY), int(Finish.TRUNCATED), 0]
    scores = [1.0] * 7 + [float("nan")]
    rows = [(prompt, "x", score) for prompt, score in zip(prompts, scores, strict=True)]
    kept = cache(experience(*rows, safety=safety, finish=finish))
    assert keys(kept) == ["safe"]
    kept.remember(experience(("unsafe", "x", 1.0), safety=[int(Safety.UNSAFE)]))
    assert keys(kept) == ["safe"] and kept.state_dict()["latest_scores"] == [1.0]


def test_good_is_from_the_median_of_the_latest_scores_on() -> None:
    first = experience(*((name, name, score) for name, score in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True)))
    kept = cache(first)
    assert keys(kept) == ["c", "d"], "the median of 1 2 3 4 is 2.5"
    kept.remember(experience(("e", "e", 2.4), ("f", "f", 2.5)))
    assert keys(kept) == ["c", "d", "f"], "the median of all six is 2.45"
    many = [(f"p{i}", "x", 100.0) for i in range(WINDOW)]
    kept = cache(first, experience(*many), size=WINDOW + 9)
    kept.remember(experience(("late", "x", 99.0)))
    assert "late" not in keys(kept) and len(kept.state_dict()["latest_scores"]) == WINDOW


def test_those_kept_longest_ago_leave_when_there_are_too_many() -> None:
    kept = cache(experience(("a", "1", 1.0), ("b", "1", 1.0), ("c", "1", 1.0)), size=3)
    kept.remember(experience(("a", "2", 1.0)))
    assert keys(kept) == ["b", "c", "a"], "an answer that is replaced by a better or equal one is new"
    kept.remember(experience(("d", "1", 1.0), ("c", "0", 0.0)))
    assert keys(kept) == ["c", "a", "d"], "a worse one renews nothing"
    kept.remember(experience(*((str(i), "x", 1.0) for i in range(7))))
    assert keys(kept) == ["4", "5", "6"]


def test_neither_padding_nor_a_copy_made_before_changes_anything() -> None:
    rows = [("abcd", "one", 1.0), ("abce", "two", 2.0), ("zz", "three", 2.0)]
    narrow, wide = cache(experience(*rows)), cache(experience(*rows, pad=7))
    assert str(narrow.state_dict()) == str(wide.state_dict())
    before = narrow.copy()
    narrow.remember(experience(("abce", "four", 3.0)))
    assert found(before, "abce") == ["two"] and found(narrow, "abce") == ["four"]


def test_the_state_is_whole_and_a_smaller_cache_takes_the_newest() -> None:
    kept = cache(experience(("abcd", "one", 1.0), ("abce", "two", 2.0), ("zz", "three", 2.0)))
    file = io.BytesIO()
    torch.save(kept.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again, smaller = AnswerCache(9, 0.5), AnswerCache(1, 0.5)
    for one in (again, smaller):
        one.load_state_dict(state)
        one.load_state_dict({})
    assert str(again.state_dict()) == str(kept.state_dict())
    assert found(again, "abce", "abcx") == found(kept, "abce", "abcx") == ["two", "two"]
    assert keys(smaller) == ["zz"]


# --- in a rollout ------------------------------------------------------------------------------------------------


def test_an_answer_is_judged_again_before_it_is_used() -> None:
    """A resumed run may know more words than the one that kept it."""
    asked = experience(("abcd", "bad", 0.0), ("zz", "bad", 0.0), ("abcd", "fine", 0.0))
    rows = Rollout(**{name: getattr(asked, name) for name in Rollout.__dataclass_fields__} | {"safety": None})
    kept = cache(experience(("abcd", "worse!", 1.0), ("zz", "good", 1.0)))

    def texts(rollout: Rollout) -> list[str]:
        pairs = zip(rollout.response_ids.tolist(), rollout.response_lengths.tolist(), strict=True)
        return ["".join(map(chr, ids[:length])) for ids, length in pairs]

    outcome = {}
    for words in (("bad",), ("bad", "worse")):
        safety = SafetyFilter.from_block({"words": words, "action": "replace", "reply": "no", "cache": 9})
        reply = [ord(letter) for letter in "no"]
        fixed: dict[str, Any] = {"seed": 1, "pad_id": 0, "reply": reply, "answers": kept, "longest": 9}
        outcome[words] = screened(lambda *_: rows, None, 1, safety, texts, **fixed)  # type: ignore[arg-type]
    first, second = outcome.values()
    assert texts(first) == ["worse!", "good", "fine"] and first.safety.tolist() == [4, 4, 0]
    assert texts(second) == ["no", "good", "fine"] and second.safety.tolist() == [3, 4, 0]
    written = second.response_mask & (second.safety != Safety.SAFE).unsqueeze(-1)
    assert torch.equal(second.rollout_logprobs.isnan(), written), "no log-probability on tokens, 0 on padding"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (WORDS | {"cache": -1}, r"module\.safety\.cache = -1 is not allowed: a whole number >= 0 and <= 100000"),
        (WORDS | {"cache": 1.5}, r"module\.safety\.cache = 1\.5 .* a whole number"),
        (WORDS | {"cache": 8, "cache_similarity": 0}, r"module\.safety\.cache_similarity = 0 .* > 0 and <= 1"),
        ({"words": ["x"], "cache": 8}, r"module\.safety\.cache = 8 is not allowed: 0 with action = discard_resample"),
        ({"words": ["x"], "action": "penalise", "cache": 8}, r"module\.safety\.cache = 8 .* 0 with action = penalise"),
        (
            {"words": ["x"], "action": "replace", "cache": 8},
            r"module\.safety\.reply = None .* the text to put in place",
        ),
    ],
)
def test_bad_settings_are_one_error(block: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        SafetyFilter.from_block(block)


def test_the_check_of_a_configuration_names_the_key(compose: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.check(compose("safety=filter", "module.safety.words=[bad]", "module.safety.cache=8"))
    assert [problem.key for problem in caught.value.problems] == ["module.safety.cache"]


# --- in a run ----------------------------------------------------------------------------------------------------


def few_prompts(module: ActorCriticModule) -> PromptDataModule:
    """So few that each comes again."""
    task = ArithmeticTask(max_value=3, split="all")
    return PromptDataModule(
        task, None, tokenizer=module.tokenizer, prompts_per_iteration=8, iterations=module.iterations, seed=3
    )


def wordy(iterations: int, *, lag: int = 0, **block: Any) -> ActorCriticModule:
    """A module whose responses end soon, at "+" as well, and often hold a listed word."""
    safety = WORDS | {"cache": 5, "cache_similarity": 0.2} | block
    module = tiny_module(iterations=iterations, safety=safety, termination={"min_tokens": 0})
    plus = module.tokenizer.convert_tokens_to_ids("+")
    module.engine = HFEngine(samples=4, max_new_tokens=6, stop_token_ids=[plus], lag=lag)
    return module


def seen(recorder: Recorder) -> list[Experience]:
    return [scored for scored, _ in recorder.of("on_experience_ready")]


def test_a_model_that_writes_a_listed_word_gets_its_good_answers_and_learns_nothing_from_them() -> None:
    module, recorder = wordy(6), Recorder()
    numbers = fit(module, [recorder], data=few_prompts(module)).callback_metrics
    judged = SafetyFilter.from_block(WORDS)
    assert judged is not None
    best: dict[str, tuple[float, str]] = {}
    scores: list[float] = []
    used = {"same": 0, "other": 0, "reply": 0}
    for scored in seen(recorder):
        assert not any(judged.unsafe(scored.texts))
        codes, keys_of = scored.safety.tolist(), scored.prompt_key
        for code, key, text in zip(codes, keys_of, scored.texts, strict=True):
            if code == Safety.CACHED and key in best:
                assert text == best[key][1], "the best answer to the same prompt"
                used["same"] += 1
            elif code == Safety.CACHED:
                assert text in {answer for _, answer in best.values()}
                used["other"] += 1
            elif code == Safety.REPLACED:
                assert text == "4+4" and key not in best
                used["reply"] += 1
        stands_in = (scored.safety == Safety.CACHED) | (scored.safety == Safety.REPLACED)
        assert torch.equal(scored.loss_mask.any(-1), ~stands_in)
        assert torch.equal(scored.rollout_logprobs.isnan(), stands_in.unsqueeze(-1) & scored.response_mask)
        own = [i for i, code in enumerate(codes) if code == Safety.SAFE and scored.finish[i] == Finish.NATURAL]
        given = scored.require("scores").tolist()
        scores += [given[i] for i in own]
        for i in own:
            key, score = keys_of[i], given[i]
            if score >= statistics.median(scores) and score >= best.get(key, (0.0, ""))[0]:
                best.pop(key, None)
                best[key] = (score, scored.texts[i])
        best = dict(list(best.items())[-5:])
    assert all(used.values()), used
    last = seen(recorder)[-1].safety
    assert numbers["safety/cached_fraction"] == (last == Safety.CACHED).float().mean() > 0
    assert numbers["safety/replaced_fraction"] == (last == Safety.REPLACED).float().mean()
    assert all(torch.isfinite(torch.as_tensor(value)) for value in numbers.values())


def test_the_table_of_samples_tells_replies_and_earlier_answers_apart(tmp_path: Path) -> None:
    module = wordy(3)
    fit(module, [SamplesTable(every_n_iterations=1, rows=32)], data=few_prompts(module), folder=tmp_path)
    table = "".join(path.read_text() for path in (tmp_path / "samples").iterdir())
    assert '"safety": "replaced"' in table and '"safety": "cached"' in table


def test_nothing_of_a_run_changes_while_the_cache_has_no_answer() -> None:
    runs = []
    for block in (WORDS, WORDS | {"cache": 5, "cache_similarity": 1.0}):
        module = tiny_module(iterations=1, safety=block)
        numbers = {k: float(v) for k, v in fit(module).callback_metrics.items() if not k.startswith(("time/", "perf/"))}
        runs.append((numbers, weights(module)))
    assert runs[0][0] == runs[1][0] and same(runs[0][1], runs[1][1])


def cached_run(folder: Path, *, lag: int = 0, dies: int = 0, resume: Path | None = None) -> tuple[Any, Recorder]:
    """Five iterations that learn from replaced responses, so that another answer would mean other weights."""
    module = wordy(5, lag=lag, train_replaced=True)
    recorder = Recorder()
    checkpoint = IterationCheckpoint(str(folder), every_n_iterations=2)
    callbacks = [recorder, RNGState(), checkpoint, *([Dies(dies)] if dies else [])]
    fit(module, callbacks, data=few_prompts(module), folder=folder, resume=resume, enable_checkpointing=True)
    return module, recorder


def run_and_die(rank: int, folder: Path, lag: int) -> None:
    cached_run(folder, lag=lag, dies=4)


@pytest.mark.parametrize("lag", [0, 1])
def test_a_killed_run_goes_on_with_its_answers(tmp_path: Path, lag: int) -> None:
    alone = {"world_size": 1, "process_group": False, "ends": [-signal.SIGKILL]}
    run_ranks(run_and_die, tmp_path, lag, folder=tmp_path, **alone)
    checkpoint = latest_valid(tmp_path)
    assert checkpoint is not None and checkpoint.name == "iteration_000002.ckpt"
    resumed, later = cached_run(tmp_path, lag=lag, resume=checkpoint)
    whole, every = cached_run(tmp_path / "whole", lag=lag)
    assert same(weights(resumed), weights(whole))
    assert str(resumed.safety.answers.state_dict()) == str(whole.safety.answers.state_dict())
    third, *_ = seen(later)
    assert all((scored.safety == Safety.CACHED).any() for scored in seen(later))
    assert [scored.texts for scored in seen(later)] == [scored.texts for scored in seen(every)[2:]]
    first, second, *_ = seen(every)
    assert not (first.safety == Safety.CACHED).any()
    assert bool((second.safety == Safety.CACHED).any()) == (lag == 0), "drawn ahead: before the first was scored"
    kept = cache(first, size=5)  # what a draw ahead for the third iteration may use
    if lag:
        used = [third.texts[i] for i, code in enumerate(third.safety.tolist()) if code == Safety.CACHED]
        texts = resumed.tokenizer.batch_decode([ids.tolist() for ids in kept.state_dict()["responses"]])
        assert {text.replace(resumed.tokenizer.eos_token, "") for text in texts} >= set(used)


def two(rank: int, folder: Path, resume: Path | None) -> tuple[str, set[str]]:
    """The answers of this rank, and the prompts that it has seen."""
    module, recorder = wordy(4 if resume else 2), Recorder()
    checkpoint = IterationCheckpoint(str(folder), every_n_iterations=2, keep=None)
    before: list[str] = []

    class Start(RLHFCallback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            before.append(str(module.safety.answers.state_dict()))

    callbacks = [RNGState(), recorder, checkpoint, Start()]
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "enable_checkpointing": True, "resume": resume}
    fit(module, callbacks, folder=folder, data=few_prompts(module), **options)
    state = before[0] if resume else str(module.safety.answers.state_dict())  # type: ignore[union-attr]
    return state, {key for scored in seen(recorder) for key in scored.prompt_key}


def test_every_rank_keeps_its_own_answers(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    written = run_ranks(two, tmp_path, None, folder=tmp_path / "first", process_group=False)
    saved = torch.load(tmp_path / "iteration_000002.ckpt", weights_only=True)["lightning_rlhf"]["answers"]
    assert [str(state) for state in saved] == [state for state, _ in written]
    for state, (_, own) in zip(saved, written, strict=True):
        assert state["keys"] and set(state["keys"]) <= own
    assert written[0][0] != written[1][0]
    resumed = run_ranks(
        two, tmp_path, tmp_path / "iteration_000002.ckpt", folder=tmp_path / "second", process_group=False
    )
    assert [state for state, _ in resumed] == [state for state, _ in written]
    alone = wordy(2)
    alone.on_load_checkpoint(torch.load(tmp_path / "iteration_000002.ckpt", weights_only=True))
    assert str(alone.safety.answers.state_dict()) == written[0][0], "one rank goes on with those of the first"  # type: ignore[union-attr]
