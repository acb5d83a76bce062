"""A run that is killed, or given more iterations, goes on with exactly the batches it has not seen (Lightning 2.6)."""

from __future__ import annotations

import string

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lightning_rlhf.data import PromptDataModule

VALIDATION = [
    {},
    {"val_check_interval": 2},
    {"val_check_interval": 3, "check_val_every_n_epoch": None},
]


class Recorder(LightningModule):
    """Takes two optimiser steps per batch, as manual optimisation may, and records its batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen, self.validated_after = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append((batch_idx, tuple(batch.texts), tuple(batch.passes)))
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward((self.weight - 1).pow(2).sum())
            optimizer.step()

    def validation_step(self, batch, batch_idx):
        self.validated_after.append(self.trainer.global_step // 2)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Killed(BaseException):
    """Ends a run as a signal would."""


class SaveAfter(Callback):
    """Writes a checkpoint at the end of one batch; then the run is killed, stopped in good order, or goes on."""

    def __init__(self, batch, path, then):
        self.batch, self.path, self.then = batch, path, then

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.batch:
            trainer.save_checkpoint(self.path)
            if self.then == "kill":
                raise Killed
            trainer.should_stop = self.then == "stop"


@pytest.fixture
def run(tmp_path):
    """``run(iterations, resume=path)``: the module after a fit over 10 prompts in batches of 4."""
    core = Tokenizer(models.WordLevel({c: i for i, c in enumerate(string.printable)}, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core)

    def _run(iterations, *callbacks, resume=None, save_after_fit=None, **trainer_options):
        data = PromptDataModule(
            [{"prompt": str(i)} for i in range(10)],
            [{"prompt": "held out"}],
            tokenizer=tokenizer,
            prompts_per_iteration=4,
            iterations=iterations,
            seed=3,
        )
        module = Recorder()
        trainer = Trainer(
            max_epochs=1,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
            callbacks=list(callbacks),
            **trainer_options,
        )
        try:
            trainer.fit(module, data, ckpt_path=resume, weights_only=True)
        except Killed:
            return module
        if save_after_fit is not None:
            trainer.save_checkpoint(save_after_fit)
        return module

    return _run


@pytest.mark.parametrize("options", VALIDATION, ids=["no interval", "interval 2", "interval 3 over epochs"])
@pytest.mark.parametrize("killed_after", [1, 2, 3, 5, 6, 7, 8])
def test_killed_run_goes_on_with_the_next_batch(run, tmp_path, killed_after, options):
    whole = run(8, **options)
    path = tmp_path / "run.ckpt"
    first = run(8, SaveAfter(killed_after, path, "kill"), **options)
    rest = run(8, resume=path, **options)
    assert [index for index, *_ in first.seen] == list(range(killed_after))
    assert first.seen + rest.seen == whole.seen
    assert torch.equal(rest.weight, whole.weight)
    later = [batch for batch in whole.validated_after if batch > killed_after]
    assert rest.validated_after == later


@pytest.mark.parametrize("options", VALIDATION, ids=["no interval", "interval 2", "interval 3 over epochs"])
@pytest.mark.parametrize("saved", ["at the last batch", "after the fit"])
def test_run_extended_at_resume_goes_on_behind_its_last_batch(run, tmp_path, saved, options):
    whole = run(12, **options)
    paths = [tmp_path / "four.ckpt", tmp_path / "eight.ckpt"]
    seen = []
    for iterations, path, resume in ((4, paths[0], None), (8, paths[1], paths[0]), (12, None, paths[1])):
        save = {}
        callbacks = []
        if path is not None and saved == "after the fit":
            save["save_after_fit"] = path
        elif path is not None:
            callbacks.append(SaveAfter(iterations, path, "go on"))
        part = run(iterations, *callbacks, resume=resume, **save, **options)
        assert len(part.seen) == 4
        seen += part.seen
    assert seen == whole.seen
    assert torch.equal(part.weight, whole.weight)


def test_run_stopped_in_good_order_goes_on(run, tmp_path):
    whole = run(8)
    path = tmp_path / "run.ckpt"
    stopped = run(8, SaveAfter(3, tmp_path / "other.ckpt", "stop"), save_after_fit=path)
    assert len(stopped.seen) == 3
    for resume in (path, tmp_path / "other.ckpt"):
        assert stopped.seen + run(8, resume=resume).seen == whole.seen


def test_finished_run_has_nothing_left_to_train(run, tmp_path):
    path = tmp_path / "run.ckpt"
    run(4, SaveAfter(4, path, "go on"))
    assert run(4, resume=path).seen == []
