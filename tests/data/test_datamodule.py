"""The data module: what each batch holds, what is held out, and what it says about unusable data."""

from __future__ import annotations

import json
import logging
import string
from copy import deepcopy

import pytest
import torch
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning import LightningModule, Trainer
from omegaconf import OmegaConf
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.data import DataError, PromptDataModule
from lightning_rlhf.data.datamodule import hold_out
from lightning_rlhf.data.loaders import PromptStream, ValidationLoader
from lightning_rlhf.data.prompts import Prompt
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import prompt_key


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core)


def rows(count: int):
    return [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(count)]


def prompts(count: int) -> list[Prompt]:
    return [Prompt([i], str(i), prompt_key(str(i)), {}) for i in range(count)]


def data(tokenizer, train, validation=None, **changes) -> PromptDataModule:
    settings = {"prompts_per_iteration": 4, "iterations": 5, "seed": 1} | changes
    return PromptDataModule(train, validation, tokenizer=tokenizer, **settings)


# --- the stream ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    share=st.integers(1, 12),
    world=st.integers(1, 3),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_each_pass_draws_every_prompt_once_and_no_tail_is_lost(size, share, world, seed, shuffle):
    ranks = [PromptStream(size, share * world, seed=seed, rank=r, world=world, shuffle=shuffle) for r in range(world)]
    batches = 1 + 3 * size // (share * world)
    drawn = [place for c in range(batches) for rank in ranks for place in rank[c]]
    assert drawn == [
        place for c in range(batches) for place in PromptStream(size, share * world, seed=seed, shuffle=shuffle)[c]
    ]
    for data_pass in range(len(drawn) // size):
        part = drawn[data_pass * size : (data_pass + 1) * size]
        assert {p for p, _ in part} == {data_pass}
        assert sorted(index for _, index in part) == list(range(size))
        if not shuffle:
            assert [index for _, index in part] == list(range(size))


@settings(deadline=None, max_examples=30)
@given(size=st.integers(1, 40), batch=st.integers(1, 12), order=st.permutations(range(8)))
def test_a_batch_is_the_same_whatever_was_drawn_before(size, batch, order):
    one, other = PromptStream(size, batch, seed=5), PromptStream(size, batch, seed=5)
    in_turn = [one[c] for c in range(8)]
    assert {c: other[c] for c in order} == dict(enumerate(in_turn))


def test_order_depends_on_seed_and_pass():
    orders = {tuple(i for _, i in PromptStream(50, 50, seed=seed)[c]) for seed in range(3) for c in range(3)}
    assert len(orders) == 9


def test_batch_must_be_divisible_by_the_number_of_processes():
    with pytest.raises(DataError, match=r"data\.prompts_per_iteration = 10 cannot be shared evenly by 4 processes"):
        PromptStream(100, 10, world=4)


# --- training batches ------------------------------------------------------------------------------------------------


def batches(module: PromptDataModule):
    module.setup("fit")
    return list(module.train_dataloader())


def test_loader_gives_exactly_the_runs_batches(tokenizer):
    module = data(tokenizer, rows(6), iterations=5)
    drawn = batches(module)
    assert len(drawn) == len(module.train_dataloader()) == 5
    assert [len(batch) for batch in drawn] == [4] * 5
    assert [batch.passes for batch in drawn[:3]] == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1]]
    assert sorted(drawn[0].texts + drawn[1].texts[:2]) == sorted(row["prompt"] for row in rows(6))
    for text, key, ids, row in zip(drawn[1].texts, drawn[1].keys, drawn[1].ids, drawn[1].rows, strict=True):
        assert key == prompt_key(text)
        assert tokenizer.decode(ids).replace(" ", "") == text
        assert row["prompt"] == text
        assert row["_source"].startswith("list:")


def test_more_prompts_per_iteration_than_there_are_is_warned_about(tokenizer, recwarn):
    rows = [{"prompt": f"{i}+1="} for i in range(6)]
    for prompts in (6, 7):
        PromptDataModule(rows, tokenizer=tokenizer, prompts_per_iteration=prompts, iterations=1).setup("fit")
    said = [str(w.message) for w in recwarn if "prompts_per_iteration" in str(w.message)]
    assert said == [
        "data.prompts_per_iteration = 7, but there are 6 training prompts: an iteration draws prompts more than once"
    ]


def test_shuffle_off_keeps_the_datas_order(tokenizer):
    drawn = batches(data(tokenizer, rows(6), shuffle=False))
    assert drawn[0].texts + drawn[1].texts[:2] == [row["prompt"] for row in rows(6)]


def test_global_random_state_is_left_alone(tokenizer):
    before = torch.get_rng_state()
    batches(data(tokenizer, rows(6)))
    assert torch.equal(torch.get_rng_state(), before)


def test_position_is_state_and_a_new_fit_begins_at_the_start(tokenizer):
    module = data(tokenizer, rows(6))
    every = [batch.texts for batch in batches(module)]
    module.setup("fit")
    start = module.state_dict()
    module.load_state_dict(start | {"consumed": 3})
    assert [batch.texts for batch in module.train_dataloader()] == every[3:]
    assert module.state_dict() == start | {"consumed": 5}
    assert [batch.texts for batch in batches(module)] == every


def test_resuming_at_or_behind_the_runs_end_is_said(tokenizer, caplog):
    module = data(tokenizer, rows(6), iterations=3)
    module.setup("fit")
    module.load_state_dict(module.state_dict() | {"consumed": 3})
    with caplog.at_level(logging.WARNING):
        assert list(module.train_dataloader()) == []
    assert "all 3 iterations are done; raise `iterations` to train on" in caplog.text
    module.load_state_dict(module.state_dict() | {"consumed": 4})
    with pytest.raises(DataError, match="iterations = 3 is not allowed: the checkpoint has already done 4"):
        module.train_dataloader()


def test_train_dataloader_needs_setup(tokenizer):
    with pytest.raises(RuntimeError, match=r"setup\('fit'\) must run before"):
        data(tokenizer, rows(6)).train_dataloader()


def test_evaluation_has_no_position(tokenizer):
    module = data(tokenizer, rows(6), rows(2))
    module.setup("validate")
    module.load_state_dict({"consumed": 3})
    assert module.state_dict() == {}


def test_data_is_read_once(tokenizer):
    class Counting:
        reads = 0

        def __iter__(self):
            self.reads += 1
            yield from rows(6)

    source = Counting()
    module = data(tokenizer, source)
    module.setup("validate")
    module.setup("fit")
    assert len(module.train_prompts) == 6
    assert source.reads == 1


# --- held-out prompts ------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(numbers=st.lists(st.integers(0, 15), min_size=2, max_size=40), size=st.integers(1, 10))
def test_held_out_prompts_are_disjoint_by_key_and_nothing_else_is_lost(numbers, size):
    all_prompts = [Prompt([n], str(n), prompt_key(str(n)), {"row": i}) for i, n in enumerate(numbers)]
    if size >= len(set(numbers)):
        with pytest.raises(DataError, match=rf"data\.validation_size = {size} leaves no training prompt"):
            hold_out(all_prompts, size)
        return
    train, held_out = hold_out(all_prompts, size)
    held_keys = [prompt.key for prompt in held_out]
    assert len(held_out) == len(set(held_keys)) == size
    assert train == [prompt for prompt in all_prompts if prompt.key not in held_keys]
    assert held_out == [
        p for i, p in enumerate(all_prompts) if p.key in held_keys and p.text not in map(str, numbers[:i])
    ]


def test_held_out_prompts_do_not_depend_on_the_runs_seed_or_the_rows_order(tokenizer):
    modules = [
        data(tokenizer, rows(30), validation_size=5, seed=1),
        data(tokenizer, rows(30)[::-1], validation_size=5, seed=2),
    ]
    first, second = ({prompt.key for prompt in module.validation_prompts} for module in modules)
    assert len(first) == 5
    assert first == second
    trained = {prompt.key for prompt in modules[0].train_prompts}
    assert len(trained) == 25
    assert not trained & first
    assert {key for batch in batches(modules[0]) for key in batch.keys} <= trained


def chat_module(tokenizer, *, today: str, **changes) -> PromptDataModule:
    tokenizer = deepcopy(tokenizer)
    tokenizer.chat_template = "Today is {{ today }}.{% for m in messages %}{{ m.content }}{% endfor %}"
    changes = {"validation_size": 8, "text_as_chat": True, "chat_template_kwargs": {"today": today}} | changes
    return data(tokenizer, rows(24), **changes)


def keys(prompts: list[Prompt]) -> list[str]:
    return [prompt.key for prompt in prompts]


def test_a_template_that_writes_the_date_moves_no_prompt_between_training_and_held_out_set(tokenizer):
    days = [chat_module(tokenizer, today=today) for today in ("9 May", "10 May")]
    first, second = days
    assert first.train_prompts[0].text != second.train_prompts[0].text
    assert keys(first.validation_prompts) == keys(second.validation_prompts)
    assert keys(first.train_prompts) == keys(second.train_prompts)
    assert [batch.keys for batch in batches(first)] == [batch.keys for batch in batches(second)]


def test_too_long_prompts_move_no_other_prompt_between_the_sets(tokenizer):
    whole = chat_module(tokenizer, today="9 May")
    longest = max(len(prompt.ids) for prompt in whole.train_prompts)
    short = chat_module(tokenizer, today="9 May", max_prompt_tokens=longest - 1)
    assert set(keys(short.validation_prompts)) < set(keys(whole.validation_prompts))
    assert set(keys(short.train_prompts)) < set(keys(whole.train_prompts))
    assert short.dropped == {"train": 14}  # 10+10= to 23+23=


def test_rows_that_differ_in_other_columns_stay_together(tokenizer):
    twice = [row | {"answer": answer} for row in rows(20) for answer in "ab"]
    module = data(tokenizer, twice, validation_size=5)
    assert (len(module.train_prompts), len(module.validation_prompts)) == (30, 5)
    assert not set(keys(module.train_prompts)) & set(keys(module.validation_prompts))


def test_a_part_that_loses_all_prompts_to_the_limit_is_refused():
    kept, lost = Prompt([1], "1", prompt_key("1"), {}), Prompt([1, 1], "11", prompt_key("11"), {})
    parts = {name: "" for name in ("training", "held-out")}
    for fits, too_long in ((kept, lost), (lost, kept)):
        with pytest.raises(DataError, match=r"data\.validation_size = 1 leaves no (training|held-out) prompt") as error:
            hold_out([fits], 1, [too_long])
        parts.pop(str(error.value).split(" leaves no ")[1].split()[0])
    assert not parts


def test_validation_source_of_its_own_in_fixed_order_and_batches(tokenizer):
    module = data(tokenizer, rows(6), rows(20)[6:], validation_limit=7, validation_batch_size=3)
    module.setup("validate")
    loader = module.val_dataloader()
    assert len(loader) == 3
    assert [batch.texts for batch in loader] == [batch.texts for batch in loader]
    assert [text for batch in loader for text in batch.texts] == [row["prompt"] for row in rows(13)[6:]]
    assert [batch.passes for batch in loader] == [[0] * 3, [0] * 3, [0]]


@given(count=st.integers(1, 30), batch=st.integers(1, 7), world=st.integers(1, 3))
def test_ranks_share_the_validation_prompts(count, batch, world):
    loaders = [ValidationLoader(prompts(count), batch, rank, world) for rank in range(world)]
    seen = [text for loader in loaders for part in loader for text in part.texts]
    assert sorted(seen) == sorted(map(str, range(count)))
    assert all(len(loader) == len(list(loader)) for loader in loaders)


def test_without_held_out_prompts_there_is_no_validation(tokenizer):
    assert list(data(tokenizer, rows(6)).val_dataloader()) == []


def test_overlap_of_validation_and_training_data_is_said(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(data(tokenizer, rows(6), rows(8)[4:]).validation_prompts) == 4
    assert (
        "data.validation: 2 of 4 prompts are in the training data as well: list:0 is list:4, list:1 is list:5"
        in caplog.text
    )


def test_repeated_prompts_are_said(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        assert len(data(tokenizer, rows(40) + rows(2)).train_prompts) == 42
        assert len(data(tokenizer, rows(7) + rows(7)).train_prompts) == 14
    assert "data.train: 2 of 42 rows repeat a prompt" in caplog.text
    assert ": list:40 is list:0, list:41 is list:1\n" in caplog.text
    assert "list:11 is list:4 and 2 more\n" in caplog.text


def test_clean_data_gives_no_warning(tokenizer, caplog):
    with caplog.at_level(logging.WARNING):
        assert data(tokenizer, rows(4), rows(8)[4:]).validation_prompts
    assert caplog.text == ""


# --- faults ----------------------------------------------------------------------------------------------------------


def test_too_long_prompts_are_dropped_counted_and_said(tokenizer, caplog):
    module = data(tokenizer, rows(12), rows(20)[12:], max_prompt_tokens=5)
    with pytest.raises(
        DataError, match=r"data\.validation: all 8 prompts are longer than .* the shortest has 6 tokens"
    ):
        module.setup("fit")
    module = data(tokenizer, rows(12), max_prompt_tokens=5)
    with caplog.at_level(logging.WARNING):
        module.setup("fit")
    assert module.dropped == {"train": 2}
    assert len(module.train_prompts) == 10
    said = "data.train: 2 of 12 prompts dropped, longer than data.max_prompt_tokens = 5 (the longest has 6)"
    assert f"{said}: list:10, list:11\n" in caplog.text


def test_errors_name_the_setting_and_the_place(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    with pytest.raises(DataError, match=rf"data\.train: there is no file {path}"):
        data(tokenizer, str(path)).setup("fit")
    path.write_text(json.dumps({"prompt": "1+1="}) + "\n" + json.dumps({"question": "?"}) + "\n")
    with pytest.raises(DataError, match=rf"data\.train: {path}:2: no prompt: the row has no 'prompt'"):
        data(tokenizer, str(path)).setup("fit")
    with pytest.raises(DataError, match=rf"data\.validation: {path}:2: no prompt"):
        data(tokenizer, rows(3), path).setup("validate")
    with pytest.raises(DataError, match=r"data\.train: 'train\.txt' is not a data file"):
        data(tokenizer, "train.txt").setup("fit")


@pytest.mark.parametrize(
    "setting",
    [
        {"prompts_per_iteration": 0},
        {"iterations": -1},
        {"validation_size": 0},
        {"validation_limit": 2.5},
        {"validation_batch_size": True},
        {"max_prompt_tokens": 0},
    ],
)
def test_settings_out_of_range_are_refused(tokenizer, setting):
    [(name, value)] = setting.items()
    with pytest.raises(SettingError, match=rf"data\.{name} = {value} is not allowed: a whole number >= 1"):
        data(tokenizer, rows(6), **setting)


def test_two_kinds_of_validation_are_refused(tokenizer):
    with pytest.raises(DataError, match=r"data\.validation_size = 2 is not allowed beside data\.validation"):
        data(tokenizer, rows(6), rows(2), validation_size=2)


def test_batches_are_not_searched_for_tensors(tokenizer):
    module = data(tokenizer, rows(6))
    batch = batches(module)[0]
    assert module.transfer_batch_to_device(batch, torch.device("meta"), 0) is batch


# --- with Hydra and Lightning ----------------------------------------------------------------------------------------


def test_configuration_instantiates(tokenizer, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(6)))
    config = OmegaConf.create(
        {
            "_target_": "lightning_rlhf.data.PromptDataModule",
            "train": {"_target_": "lightning_rlhf.data.JSONLSource", "path": str(path), "limit": 5},
            "validation": [{"prompt": "7+7="}],
            "prompts_per_iteration": 2,
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )
    module = instantiate(config, tokenizer=tokenizer, iterations=2)
    assert len(module.train_prompts) == 5
    assert module.validation_prompts[0].text == "7+7="


class Recorder(LightningModule):
    """Keeps the batches it is given."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch)

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("validation", [None, rows(9)[6:]])
def test_batches_reach_the_module_as_they_are(tokenizer, tmp_path, precision, validation):
    module, recorder = data(tokenizer, rows(6), validation), Recorder()
    trainer = Trainer(
        max_epochs=1,
        use_distributed_sampler=False,
        precision=precision,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(recorder, module)
    assert [batch.texts for batch in recorder.trained] == [batch.texts for batch in batches(module)]
    assert recorder.trained[0].rows[0] in [prompt.row for prompt in module.train_prompts]
    assert [batch.texts for batch in recorder.validated[-1:]] == ([["6+6=", "7+7=", "8+8="]] if validation else [])
