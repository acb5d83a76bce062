"""Unsafe responses: what is found, and what each action makes of them."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble
from lightning_rlhf.callbacks import SamplesTable
from lightning_rlhf.callbacks.prompt_monitor import visits_of
from lightning_rlhf.checkpoint import IterationCheckpoint, RNGState
from lightning_rlhf.errors import ConfigError, InputError, SettingError
from lightning_rlhf.experience import Safety
from lightning_rlhf.metrics.batch import MetricBatch
from lightning_rlhf.models import build_tiny
from lightning_rlhf.rewards import RewardError
from lightning_rlhf.rewards.safety import SafetyFilter
from lightning_rlhf.rollout import HFEngine
from tests.ranks import run_ranks
from tests.support import VOCABULARY, Recorder, fit, moments, prompts, resume_equals_whole, same, tiny_module, weights

ODD = {"patterns": ["[13579]"]}
"""Responses with an odd digit are unsafe: the untrained model writes many of them."""
ALL = {"patterns": ["(?s).*"]}


def filter_of(**block: Any) -> SafetyFilter:
    built = SafetyFilter.from_block(block)
    assert built is not None
    return built


def classifier_folder(folder: Path) -> str:
    """A real classifier of characters, trained for a moment to call texts with a 7 toxic."""
    tiny = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2)
    config = BertConfig(
        vocab_size=len(tiny.tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=16, max_position_embeddings=64, id2label={0: "fine", 1: "toxic"},
        label2id={"fine": 0, "toxic": 1},
    )  # fmt: skip
    torch.manual_seed(0)
    model = BertForSequenceClassification(config)
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(250):
        length = int(torch.randint(1, 9, (1,), generator=generator))
        others = torch.randint(9, (32, length), generator=generator).tolist()
        texts = ["".join("012345689"[digit] for digit in row) for row in others]
        texts[1::4] = [f"7{text[1:]}" for text in texts[1::4]]
        texts[3::4] = [f"{text[:-1]}7" for text in texts[3::4]]
        ids = torch.tensor(tiny.tokenizer(texts, add_special_tokens=False)["input_ids"])
        loss = torch.nn.functional.cross_entropy(model(input_ids=ids).logits, torch.arange(32) % 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tiny.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def toxic(tmp_path_factory: pytest.TempPathFactory) -> str:
    return classifier_folder(tmp_path_factory.mktemp("classifier"))


# --- what is found -----------------------------------------------------------------------------------------------


def test_words_are_whole_words_in_any_case_and_patterns_are_searched() -> None:
    judged = filter_of(words=["bad", "so so"], patterns=[r"\d{3}", "Exact"])
    texts = ["BAD!", "badly", "very bad", "so so", "so  so", "12", "x123", "exact", "Exactly", ""]
    expected = [True, False, True, True, False, False, True, False, True, False]
    assert judged.unsafe(texts) == expected


def test_the_classifier_reads_what_words_let_pass_and_every_window_of_it(toxic: str) -> None:
    judged = filter_of(words=["12"], classifier={"path": toxic, "label": "toxic", "batch_size": 2, "max_tokens": 8})
    texts = ["171", "123456", "12", "000000", "7", "0" * 30 + "7" + "0" * 3, "0" * 30, ""]
    assert judged.unsafe(texts) == [True, False, True, False, True, True, False, False]
    assert judged.classifier is not None
    together = judged.classifier.probabilities(texts)
    alone = torch.cat([judged.classifier.probabilities([text]) for text in texts])
    torch.testing.assert_close(together, alone)
    by_number = filter_of(classifier={"path": toxic, "label": "1", "max_tokens": 8}).classifier
    assert by_number is not None and torch.equal(by_number.probabilities(["171"]), together[:1])


def test_what_was_found_is_told(toxic: str) -> None:
    classifier = {"path": toxic, "label": "1", "max_tokens": 8}
    judged = filter_of(words=["12", "so"], patterns=["^0", "9$"], classifier=classifier)
    texts = ["9 SO 12", "0 12", "019", "171", "4"]
    said = [finding and (finding["found_by"], finding["found"]) for finding in judged.findings(texts)]
    assert said == [("word", "12"), ("word", "12"), ("pattern", "^0"), ("classifier", "toxic"), None]
    assert judged.classifier is not None
    told = [finding for finding in judged.findings(texts) if finding]
    assert [finding["response"] for finding in told] == texts[:4]
    expected = [None, None, None, float(judged.classifier.probabilities(["171"]))]
    assert [finding["probability"] for finding in told] == expected


def test_a_classifier_that_answers_nan_is_an_error(toxic: str, tmp_path: Path) -> None:
    """NaN is over no threshold, so everything would pass."""
    broken = BertForSequenceClassification.from_pretrained(toxic)
    torch.nn.init.constant_(broken.classifier.weight, math.nan)
    broken.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(toxic).save_pretrained(tmp_path)
    judged = filter_of(classifier={"path": str(tmp_path), "label": "toxic"})
    with pytest.raises(RewardError, match=r"module\.safety\.classifier: .* gives nan in place of .* for '171'"):
        judged.unsafe(["171"])


def test_the_threshold_decides(toxic: str) -> None:
    strict = filter_of(classifier={"path": toxic, "label": "toxic", "threshold": 1e-9})
    assert strict.unsafe(["000000"]) == [True]


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, r"module\.safety\.words = \[\] is not allowed: a word at least, or one in patterns, or a classifier"),
        ({"patterns": ["ok", "("]}, r"module\.safety\.patterns = .*'\(': missing \)"),
        ({"words": "bad"}, r"module\.safety\.words = 'bad' is not allowed: a list of texts"),
        ({"words": [""]}, r"module\.safety\.words"),
        ({"words": ["x"], "action": "drop"}, r"module\.safety\.action = 'drop' .* discard_resample, replace, penalise"),
        ({"words": ["x"], "attempts": 0}, r"module\.safety\.attempts = 0 .* a whole number >= 1"),
        ({"words": ["x"], "penalty": 10}, r"module\.safety\.penalty = 10 .* < 0"),
        ({"words": ["x"], "action": "replace"}, r"module\.safety\.reply = None .* the text to put in place"),
        (
            {"words": ["x"], "action": "replace", "reply": "an x"},
            r"module\.safety\.reply = 'an x' is not allowed: a text that the filter lets pass; the word 'x' finds it",
        ),
        ({"words": ["x"], "reply": "no"}, r"module\.safety\.reply = 'no' .* null with action = discard_resample"),
        ({"words": ["x"], "train_replaced": True}, r"module\.safety\.train_replaced = True .* false"),
        ({"classifier": {"label": "toxic"}}, r"module\.safety\.classifier = .* missing: path"),
        ({"classifier": {"path": "x", "treshold": 1}}, r"module\.safety\.classifier\.treshold .* 'threshold'"),
        (
            {"classifier": {"path": "/no/such"}},
            r"classifier\.path = '/no/such' is not .* no such file or folder$",
        ),
        (
            {"classifier": {"path": "x", "dtype": "int8"}},
            r"\.classifier\.dtype = 'int8' .* such as float32",
        ),
    ],
)
def test_bad_settings_are_one_error(block: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        SafetyFilter.from_block(block)


def test_an_unknown_label_names_those_there_are(toxic: str) -> None:
    with pytest.raises(SettingError, match=r"classifier\.label = 'poison' .* fine \(0\), toxic \(1\)"):
        filter_of(classifier={"path": toxic, "label": "poison"})
    with pytest.raises(SettingError, match=r"classifier\.label = None .* fine \(0\), toxic \(1\)"):
        filter_of(classifier={"path": toxic})


def test_a_language_model_is_no_classifier(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, without the table of weights that transformers prints."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    tiny = build_tiny(VOCABULARY, hidden_size=32, layers=1, heads=2)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(SettingError) as caught:
        filter_of(classifier={"path": str(tmp_path), "label": "0"})
    assert str(caught.value) == (
        f"module.safety.classifier.path = {str(tmp_path)!r} is not allowed: a text classifier is wanted; the model has "
        "no trained score.weight, which a plain language model lacks"
    )
    assert not caplog.records


def test_an_empty_folder_is_no_classifier(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"classifier\.path = .* a text classifier is wanted; the folder is empty$"):
        filter_of(classifier={"path": str(tmp_path), "label": "0"})


def test_a_reply_with_characters_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(
        SettingError, match=r"module\.safety\.reply = '4\u00e4' .* can read: the model has no token for '\u00e4'"
    ):
        tiny_module(safety={**ODD, "action": "replace", "reply": "4\u00e4"})


def test_a_reply_that_cannot_be_written_is_refused_before_any_warm_up(compose: Any) -> None:
    small = ["logger=none", "data.train.max_value=4", "data.validation.size=2", "warmup.answer_field=no_such_column"]
    block = ["safety=filter", "module.safety.words=[bad]", "module.safety.action=replace"]
    for reply in ("\u00e4", "1" * 99):
        with pytest.raises(InputError, match=r"module\.safety\.reply = ") as caught:
            assemble(schema.check(compose(*small, *block, f"module.safety.reply='{reply}'")))
        assert "answer_field" not in str(caught.value), "which the warm-up refuses"


def test_a_reply_that_is_too_long_is_refused() -> None:
    with pytest.raises(SettingError, match=r"module\.safety\.reply = '2222222' .* at most rollout\.max_new_tokens = 6"):
        tiny_module(safety={**ODD, "action": "replace", "reply": "2222222"})


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["module.safety.patterns=['(']"], "module.safety.patterns"),
        (["module.safety.wrods=[bad]"], "module.safety.wrods"),
        (["module.safety.classifier={path: x, label: y, threshold: 2}"], "module.safety.classifier.threshold"),
        (
            [
                *("rollout_correction=monitor", "module.safety.words=[bad]"),
                *("module.safety.action=replace", "module.safety.reply=x", "module.safety.train_replaced=true"),
            ],
            "module.safety.train_replaced",
        ),
    ],
)
def test_the_check_of_a_configuration_names_the_key(compose: Any, overrides: list[str], key: str) -> None:
    plus = [f"+{word}" if "wrods" in word else word for word in overrides]
    with pytest.raises(ConfigError) as caught:
        schema.check(compose("safety=filter", *plus))
    assert [problem.key for problem in caught.value.problems] == [key]


# --- what becomes of them ----------------------------------------------------------------------------------------


def run(safety: dict[str, Any] | None, *, iterations: int = 1, **settings: Any) -> tuple[Any, Any, dict[str, float]]:
    """Module, the last experience, and the metrics."""
    recorder = Recorder()
    module = tiny_module(iterations=iterations, safety=safety, **settings)
    numbers = {name: float(value) for name, value in fit(module, [recorder]).callback_metrics.items()}
    return module, recorder.of("on_experience_ready")[-1][0], numbers


def is_odd(text: str) -> bool:
    return any(character in "13579" for character in text)


def test_unsafe_responses_are_drawn_again_and_what_stays_unsafe_leaves_the_loss() -> None:
    _, plain, without = run(None)
    _, experience, numbers = run(ODD | {"attempts": 2})
    assert len(experience) == len(plain), "the batch keeps its size"
    codes = experience.safety
    odd = torch.tensor([is_odd(text) for text in experience.texts])
    first = torch.tensor([is_odd(text) for text in plain.texts])
    assert torch.equal(odd, codes == Safety.UNSAFE)
    assert torch.equal(first, codes != Safety.SAFE)
    assert (codes == Safety.REDRAWN).any() and (codes == Safety.UNSAFE).any() and (codes == Safety.SAFE).any()
    for row in (codes == Safety.SAFE).nonzero().flatten().tolist():
        assert experience.texts[row] == plain.texts[row], "safe first draws are those of a run without the filter"
    assert torch.equal(experience.loss_mask.any(-1), ~odd)
    assert numbers["safety/flagged_fraction"] == first.float().mean()
    assert numbers["safety/unsafe_fraction"] == odd.float().mean()
    assert numbers["safety/redrawn_fraction"] == (first & ~odd).float().mean()
    assert numbers["safety/replaced_fraction"] == 0 and not any(name.startswith("safety/") for name in without)


def test_redrawn_responses_are_the_policys_own() -> None:
    """Tokens, log-probabilities and masks were put together rightly: the first ratio is 1."""
    _, experience, numbers = run(ODD | {"attempts": 4}, update={"epochs": 1, "minibatch_size": 16})
    assert (experience.safety == Safety.REDRAWN).any()
    torch.testing.assert_close(experience.old_logprobs, experience.rollout_logprobs, atol=1e-4, rtol=0)
    assert numbers["rollout/logprob_abs_diff_max"] < 1e-4
    assert len(set(experience.seed.tolist())) == len(experience), "every row has its own seed"


@pytest.mark.parametrize(
    "block",
    [
        {"attempts": 1},
        {"action": "replace", "reply": "4+4"},
        {"action": "replace", "reply": "4+4", "train_replaced": True},
        {"action": "replace", "reply": "4+4", "cache": 8, "cache_similarity": 0.1},
        {"action": "penalise"},
    ],
)
def test_scores_are_measured_on_the_policys_own_responses(block: dict[str, Any]) -> None:
    """Metrics, what callbacks see, and the visits of prompts; what is penalised is the policy's own and counts."""
    module = tiny_module(iterations=3, safety=ODD | block)
    recorder = Recorder()
    numbers = {name: float(value) for name, value in fit(module, [recorder]).callback_metrics.items()}
    experience, stats = recorder.of("on_experience_ready")[-1]
    left = {Safety.UNSAFE, Safety.REPLACED, Safety.CACHED} if block.get("action") != "penalise" else set()
    own = torch.tensor([code not in left for code in experience.safety.tolist()])
    assert own.any() and (not left or not own.all()), "else nothing is shown"
    scores = experience.scores.double()[own]
    assert numbers["reward/mean"] == pytest.approx(float(scores.mean()), rel=1e-6)
    assert numbers["reward/std"] == pytest.approx(float(scores.std()), rel=1e-6)
    assert (numbers["reward/max"], numbers["reward/min"]) == (float(scores.max()), float(scores.min()))
    assert numbers["reward/term/score"] == numbers["reward/mean"]
    kl = (experience.old_logprobs - experience.ref_logprobs).sum(-1).double()[own]
    paid = scores - module.settings.kl.coefficient * kl
    assert numbers["reward/total_with_kl"] == pytest.approx(float(paid.mean()), abs=1e-6)
    assert (stats.score_mean, stats.score_std) == pytest.approx((numbers["reward/mean"], numbers["reward/std"]))
    assert sum(visit.samples for visit in visits_of(experience)) == int(own.sum())
    assert numbers["response/length_mean"] == experience.response_lengths.float().mean(), "of all rows"


def test_groups_of_prompts_measure_scores_on_the_same_rows() -> None:
    module, recorder = tiny_module(iterations=1, safety=ODD | {"action": "replace", "reply": "4+4"}), Recorder()
    fit(module, [recorder])
    experience = recorder.of("on_experience_ready")[-1][0]
    experience.prompt_group = ["all"] * len(experience)
    module.groups.take(["all"], {"all": "all"})
    module.groups.measure(experience, metrics := MetricBatch())
    numbers, own = metrics.compute(), experience.safety == Safety.SAFE
    assert numbers["group/all/reward_mean"] == pytest.approx(float(experience.scores[own].mean()), rel=1e-6)
    assert numbers["group/all/reward_std"] == pytest.approx(float(experience.scores[own].std()), rel=1e-6)
    assert numbers["group/all/samples"] == len(experience) > own.sum()


def test_a_batch_that_stays_unsafe_as_a_whole_trains_nothing() -> None:
    before = weights(tiny_module())
    module, experience, numbers = run(ALL, iterations=2)
    assert not any(name.startswith("reward/") and name != "reward/overridden_fraction" for name in numbers)
    assert (experience.safety == Safety.UNSAFE).all() and numbers["safety/unsafe_fraction"] == 1
    assert same(before, weights(module)) and moments(module) == {}
    assert all(math.isfinite(value) for value in numbers.values())


def test_a_penalty_is_added_to_the_score() -> None:
    _, experience, numbers = run(ODD | {"action": "penalise"})
    odd = torch.tensor([is_odd(text) for text in experience.texts])
    assert torch.equal(experience.rewards, experience.scores - 10 * odd.float())
    assert experience.loss_mask.any(-1).all()
    assert numbers["safety/unsafe_fraction"] == odd.float().mean() and numbers["safety/redrawn_fraction"] == 0
    _, both, _ = run(ODD | {"action": "penalise"}, termination={"truncated": "penalty", "min_tokens": 0})
    cut = both.finish == 2
    assert torch.equal(both.rewards, both.scores - 10 * odd.float() - 2 * cut.float()), "beside those of termination"


@pytest.mark.parametrize("trained", [False, True])
def test_a_reply_stands_in_place_and_trains_nothing_unless_asked_for(trained: bool) -> None:
    block = ODD | {"action": "replace", "reply": "4+4", "train_replaced": trained}
    _, experience, numbers = run(block)
    replaced = experience.safety == Safety.REPLACED
    assert 0 < replaced.sum() < len(replaced) and not any(is_odd(text) for text in experience.texts)
    assert {experience.texts[row] for row in replaced.nonzero().flatten().tolist()} == {"4+4"}
    assert torch.equal(experience.loss_mask.any(-1), ~replaced | trained)
    assert torch.equal(experience.rollout_logprobs.isnan().any(-1), replaced), "the engine has not drawn it"
    assert numbers["safety/replaced_fraction"] == replaced.float().mean()
    assert numbers["rollout/logprob_abs_diff_max"] < 1e-4, "measured on the engine's own tokens alone"
    assert all(math.isfinite(value) for value in numbers.values())


@pytest.mark.parametrize("bypass_mode", [False, True])
def test_rollout_correction_knows_nothing_of_replies(bypass_mode: bool) -> None:
    block = ODD | {"action": "replace", "reply": "4"}
    is_ = {"rollout_is": None} if bypass_mode else {"rollout_is": "token", "rollout_is_threshold": 2.0}
    module, experience, numbers = run(block, rollout_correction={"bypass_mode": bypass_mode, **is_})
    replaced = experience.safety == Safety.REPLACED
    assert replaced.any() and not experience.loss_mask[replaced].any()
    assert all(math.isfinite(value) for value in numbers.values())
    assert all(tensor.isfinite().all() for tensor in weights(module).values())


def test_the_classifier_acts_in_a_run(toxic: str) -> None:
    _, experience, numbers = run({"classifier": {"path": toxic, "label": "toxic"}, "attempts": 1})
    assert 0 < numbers["safety/flagged_fraction"] < 1
    judged = filter_of(classifier={"path": toxic, "label": "toxic"})
    assert judged.unsafe(experience.texts) == (experience.safety == Safety.UNSAFE).tolist()


def test_held_out_answers_are_not_filtered() -> None:
    seen = []
    for safety in (None, ALL):
        module = tiny_module(iterations=1, safety=safety, actor={"lr": 1e-9}, critic={"lr": 1e-9})
        trainer = fit(module, limit_val_batches=1)
        seen += trainer.validate(module, datamodule=prompts(module), verbose=False)
    assert seen[0] == pytest.approx(seen[1], abs=1e-6) and seen[0]["eval/response_length_mean"] > 0


def test_the_table_of_samples_says_what_became_of_each(tmp_path: Path) -> None:
    fit(tiny_module(iterations=1, safety=ODD), [SamplesTable(rows=16)], folder=tmp_path)
    table = (tmp_path / "samples" / "iteration_000001.jsonl").read_text()
    assert '"safety": "safe"' in table and '"safety": "redrawn"' in table


@pytest.mark.parametrize(
    ("block", "outcomes"),
    [
        ({"attempts": 2}, {"discarded", "left_out"}),
        ({"action": "replace", "reply": "4", "cache": 8, "cache_similarity": 0.1}, {"replaced", "cached"}),
        ({"action": "penalise"}, {"penalised"}),
    ],
)
def test_every_unsafe_draw_is_kept_with_what_became_of_it(block: dict[str, Any], outcomes: set[str]) -> None:
    _, plain, _ = run(None)
    module, recorder = tiny_module(iterations=5, safety=ODD | block, termination={"min_tokens": 0}), Recorder()
    fit(module, [recorder])
    experiences = [scored for scored, _ in recorder.of("on_experience_ready")]
    found: set[str] = set()
    for scored in experiences:
        for code, text, draws in zip(scored.safety.tolist(), scored.texts, scored.unsafe_draws, strict=True):
            assert all(is_odd(draw["response"]) and draw["found_by"] == "pattern" for draw in draws)
            assert all(draw["found"] == "[13579]" and draw["probability"] is None for draw in draws)
            assert bool(draws) == (code != Safety.SAFE)
            told = [draw["outcome"] for draw in draws]
            found |= set(told)
            if code == Safety.REDRAWN:
                assert len(draws) <= 2 and set(told) == {"discarded"} and text not in {d["response"] for d in draws}
            elif code == Safety.UNSAFE and "attempts" in block:
                assert told == ["discarded", "discarded", "left_out"] and draws[-1]["response"] == text
            elif code != Safety.SAFE:
                assert told == [{2: "penalised", 3: "replaced", 4: "cached"}[code]]
    assert found == outcomes
    first = [
        draws[0]["response"] if draws else text
        for draws, text in zip(experiences[0].unsafe_draws, experiences[0].texts, strict=True)
    ]
    assert first == plain.texts, "together they are the first draws of any run"


def lagging() -> Any:
    module = tiny_module(iterations=4, safety=ODD | {"action": "replace", "reply": "4"})
    module.engine = HFEngine(samples=2, max_new_tokens=6, lag=1)
    return module


@pytest.mark.parametrize("ahead", [False, True])
def test_a_resumed_run_goes_on_alike(tmp_path: Path, ahead: bool) -> None:
    resume_equals_whole(tmp_path, list, lagging if ahead else lambda: tiny_module(iterations=4, safety=ODD))


def test_a_rollout_that_was_drawn_ahead_without_the_filter_is_drawn_again(tmp_path: Path) -> None:
    """The filter was switched on for a branch of the run."""
    bare = lagging()
    bare.safety = None
    checkpoint = IterationCheckpoint(str(tmp_path), every_n_iterations=2, keep=None)
    fit(bare, [RNGState(), checkpoint], folder=tmp_path, enable_checkpointing=True)
    recorder, filtered = Recorder(), lagging()
    fit(filtered, [RNGState(), recorder], folder=tmp_path, resume=tmp_path / "iteration_000002.ckpt")
    third, fourth = recorder.of("on_rollout_end")
    assert third.safety is not None and third.policy_version.unique().tolist() == [2]
    assert fourth.policy_version.unique().tolist() == [2]


def two(rank: int) -> tuple[dict[str, float], list[float]]:
    """Two ranks; on rank 1 every response is unsafe."""
    safety = ALL if rank else {"patterns": ["no such text"]}
    module = tiny_module(iterations=2, safety=safety)
    trainer = fit(module, strategy="ddp", devices=2)
    numbers = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("safety/")}
    return numbers, [float(p.double().sum()) for p in weights(module).values()]


def test_two_ranks_agree_although_one_has_nothing_left(tmp_path: Path) -> None:
    (first, left), (second, right) = run_ranks(two, folder=tmp_path, process_group=False)
    assert first == second and first["safety/unsafe_fraction"] == 0.5
    assert left == right and left != [float(p.double().sum()) for p in weights(tiny_module()).values()]
