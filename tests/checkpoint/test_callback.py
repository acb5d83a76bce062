"""Checkpoints: counted in iterations, complete or absent, plain data, and resumed bit for bit."""

from __future__ import annotations

import os
import random
import resource
import signal
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from omegaconf import OmegaConf

from lightning_rlhf.checkpoint import (
    AtomicCheckpointIO,
    CheckpointError,
    IterationCheckpoint,
    RNGState,
    latest_valid,
    plain,
    verify,
    warn_about_model_checkpoint,
)
from lightning_rlhf.checkpoint.random_state import _restore_rng, _rng_state
from tests.ranks import run_ranks

UPDATES = [8, 5, 8, 3, 8, 2, 8, 1, 6, 4]
"""Optimiser steps of each iteration, as in a run whose PPO epochs end early."""


class Tiny(LightningModule):
    """Manual optimisation, a varying number of steps per batch, random numbers from three generators."""

    def __init__(self, stop_after: int | None = None, **hparams: Any) -> None:
        super().__init__()
        self.save_hyperparameters(hparams)
        self.automatic_optimization = False
        torch.manual_seed(1)
        self.layer_in = torch.nn.Linear(4, 64)
        self.layer_out = torch.nn.Linear(64, 1)
        self.iteration, self.stop_after = 0, stop_after
        self.at: dict[int, Any] = {}
        self.extra: Any = None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        for _ in range(UPDATES[self.iteration]):
            x = torch.randn(3, 4) * random.random() * float(np.random.rand()) + batch
            optimizer.zero_grad()
            self.manual_backward(self.layer_out(torch.tanh(self.layer_in(x))).square().mean())
            optimizer.step()
        self.iteration += 1
        self.log("score", {2: float("nan"), 4: 3.0, 6: 2.0, 8: float("nan")}.get(self.iteration, 0.0))
        if self.iteration in self.at:
            self.at[self.iteration](self)
        if self.iteration == self.stop_after:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["module_iteration"] = self.iteration
        if self.extra is not None:
            checkpoint["extra"] = self.extra

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.iteration = checkpoint["module_iteration"]


class Numbers(LightningDataModule):
    """Batch c is the number c; the position is state."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.batches, self.consumed = batches, 0

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.consumed < self.batches:
            self.consumed += 1
            yield torch.tensor(float(self.consumed))

    def train_dataloader(self) -> Any:
        return self

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.consumed = state_dict["consumed"]


def fit(
    *callbacks: Any, module: Tiny | None = None, batches: int = 8, resume: Path | str | None = None, **options: Any
) -> Tiny:
    module = Tiny() if module is None else module
    seed_everything(1, verbose=False)
    options = {"max_epochs": 1, "logger": False, **options}
    trainer = Trainer(
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=list(callbacks),
        **options,
    )
    trainer.fit(module, datamodule=Numbers(batches), ckpt_path=resume)
    return module


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        yield


def names(folder: Path) -> list[str]:
    """All files, without the record that each good checkpoint has."""
    found = set(os.listdir(folder))
    assert found >= {name.replace(".ckpt", ".verified.json") for name in found if name.endswith(".ckpt")}
    return sorted(name for name in found if ".verified.json" not in name)


def files(*iterations: int) -> list[str]:
    return [f"iteration_{n:06d}.ckpt" for n in iterations]


def everything(module: Tiny) -> list[torch.Tensor]:
    """Weights and Adam's moments, then one draw of each generator."""
    optimizer = module.trainer.optimizers[0]
    moments = [state[key] for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq", "step")]
    draws = [torch.randn(3), torch.tensor(random.random()), torch.tensor(float(np.random.rand()))]
    return [p.detach() for p in module.parameters()] + moments + draws


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """Every file of this process may hold `size` bytes: the kernel refuses the write that goes further."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- when ------------------------------------------------------------------------------------------------------------


def test_counts_iterations_whatever_the_number_of_updates(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path, every_n_iterations=3, keep=None))
    assert names(tmp_path) == files(1, 3, 6, 8)  # 1 is the first, 8 the end of the run
    steps = [torch.load(tmp_path / name, weights_only=True)["global_step"] for name in names(tmp_path)]
    assert steps == [8, 8 + 5 + 8, 8 + 5 + 8 + 3 + 8 + 2, sum(UPDATES[:8])]


def test_lightnings_own_trigger_misses_iterations(tmp_path: Path) -> None:
    """Why this callback exists: 10 divides the step count at the end of an iteration only by chance."""
    fit(ModelCheckpoint(tmp_path, every_n_train_steps=10, save_top_k=-1), batches=6)
    assert names(tmp_path) == []


def test_keeps_the_newest(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path, every_n_iterations=1, keep=2))
    assert names(tmp_path) == files(7, 8)


def test_keeps_the_best_of_a_metric(tmp_path: Path) -> None:
    callback = IterationCheckpoint(tmp_path, every_n_iterations=2, keep=1, monitor="score")
    fit(callback, log_every_n_steps=1)
    assert names(tmp_path) == files(4, 8)  # 2 and 8 are not numbers, 6 is worse
    assert callback.best_model_path == str(tmp_path / files(4)[0]) and callback.best_model_score == 3.0
    resumed = IterationCheckpoint(tmp_path, every_n_iterations=2, keep=1, monitor="score")
    fit(resumed, batches=10, resume=tmp_path / files(8)[0], max_epochs=-1, module=Tiny(stop_after=10))
    assert resumed.best_model_path == callback.best_model_path
    assert names(tmp_path) == files(4, 10)


def test_smallest_is_best_in_mode_min(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path, every_n_iterations=2, keep=1, monitor="score", mode="min"))
    assert names(tmp_path) == files(1, 8)


def test_misspelt_monitor_is_named_with_the_nearest_metric(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"'scor' is not logged; did you mean score\?"):
        fit(IterationCheckpoint(tmp_path, every_n_iterations=2, monitor="scor"), batches=2)


def test_a_stop_is_saved_and_resumed(tmp_path: Path) -> None:
    whole = everything(fit(RNGState(), IterationCheckpoint(tmp_path / "whole")))
    fit(RNGState(), IterationCheckpoint(tmp_path / "a", every_n_iterations=3), module=Tiny(stop_after=5))
    assert names(tmp_path / "a") == files(3, 5)
    resumed = fit(RNGState(), IterationCheckpoint(tmp_path / "b"), resume=tmp_path / "a" / files(5)[0])
    assert equal(everything(resumed), whole)


def test_a_stop_requested_after_the_callbacks_is_saved_too(tmp_path: Path) -> None:
    class Late(Tiny):
        def on_train_batch_end(self, *args: Any) -> None:
            self.trainer.should_stop = self.iteration == 5

    fit(IterationCheckpoint(tmp_path, every_n_iterations=3), module=Late())
    assert names(tmp_path) == files(3, 5)


def test_sigterm_saves_before_the_run_ends(tmp_path: Path) -> None:
    module = Tiny()
    module.at[4] = lambda _: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        fit(IterationCheckpoint(tmp_path, every_n_iterations=3), module=module)
    assert names(tmp_path) == files(3, 4)


def test_an_error_leaves_the_last_whole_iteration(tmp_path: Path) -> None:
    module = Tiny()
    module.at[5] = lambda _: [][0]
    with pytest.raises(IndexError):
        fit(IterationCheckpoint(tmp_path, every_n_iterations=2), module=module)
    assert names(tmp_path) == files(2, 4)


def test_saves_behind_every_other_callback(tmp_path: Path) -> None:
    """A callback that changes state in on_train_batch_end is saved with the change, wherever it stands in the list."""

    class Count(RNGState):
        seen = 0

        def on_train_batch_end(self, *args: Any) -> None:
            self.seen += 1

        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
            checkpoint["seen"] = self.seen

        def on_load_checkpoint(self, *args: Any) -> None: ...

    fit(IterationCheckpoint(tmp_path, every_n_iterations=3), Count(), batches=3)
    assert torch.load(tmp_path / files(3)[0], weights_only=True)["seen"] == 3


def test_two_triggers_side_by_side(tmp_path: Path) -> None:
    recent = IterationCheckpoint(tmp_path / "recent", every_n_iterations=2, keep=1)
    archive = IterationCheckpoint(tmp_path / "archive", every_n_iterations=3, keep=None)
    fit(recent, archive, batches=7)
    assert names(tmp_path / "recent") == files(7) and names(tmp_path / "archive") == files(1, 3, 6, 7)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every_n_iterations": 0}, "every_n_iterations = 0 is not allowed"),
        ({"every_n_iterations": 2.5}, "every_n_iterations = 2.5 is not allowed"),
        ({"keep": 0}, "keep = 0 is not allowed"),
        ({"mode": "biggest"}, "mode = 'biggest' is not allowed: min or max"),
        ({"dirpath": "s3://bucket/run"}, "a local folder"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        IterationCheckpoint(**{"dirpath": tmp_path, **arguments})


# --- resume ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[torch.Tensor]]:
    folder = tmp_path_factory.mktemp("whole")
    module = fit(RNGState(), IterationCheckpoint(folder, every_n_iterations=1, keep=None))
    return folder, everything(module)


@pytest.mark.parametrize("iteration", [1, 2, 3, 4, 5, 6, 7])
def test_resumes_bit_for_bit(tmp_path: Path, uninterrupted: tuple[Path, list[torch.Tensor]], iteration: int) -> None:
    folder, expected = uninterrupted
    callback = IterationCheckpoint(tmp_path, every_n_iterations=3, keep=None)
    resumed = fit(RNGState(), callback, resume=folder / files(iteration)[0])
    assert equal(everything(resumed), expected)
    assert callback.iteration == 8  # the count goes on although the arguments are others than when it was saved
    assert names(tmp_path) == files(*sorted({n for n in (3, 6) if n > iteration} | {8}))


def test_without_rng_state_a_resumed_run_draws_other_numbers(
    tmp_path: Path, uninterrupted: tuple[Path, list[torch.Tensor]]
) -> None:
    folder, expected = uninterrupted
    resumed = fit(IterationCheckpoint(tmp_path), resume=folder / files(4)[0])
    assert not equal(everything(resumed), expected)


def test_a_finished_run_can_be_prolonged(tmp_path: Path) -> None:
    """With max_epochs=-1 and a stop by the module, as the kit runs; max_epochs=1 counts the epoch as done."""
    options: dict[str, Any] = {"max_epochs": -1}
    whole = fit(RNGState(), IterationCheckpoint(tmp_path / "a"), module=Tiny(stop_after=8), **options)
    expected = everything(whole)
    fit(RNGState(), IterationCheckpoint(tmp_path / "b"), module=Tiny(stop_after=5), batches=5, **options)
    last = latest_valid(tmp_path / "b")
    longer = fit(RNGState(), IterationCheckpoint(tmp_path / "c"), module=Tiny(stop_after=8), resume=last, **options)
    assert equal(everything(longer), expected)


def test_checkpoints_of_an_abandoned_future_are_set_aside(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path, every_n_iterations=2, keep=None))
    module = Tiny(stop_after=5)
    with pytest.warns(UserWarning, match=r"continues from iteration 4; 2 checkpoint\(s\) of later"):
        fit(IterationCheckpoint(tmp_path, every_n_iterations=2, keep=2), module=module, resume=tmp_path / files(4)[0])
    assert names(tmp_path) == [*files(4, 5), *(f"{name}.set_aside" for name in files(6, 8))]
    assert latest_valid(tmp_path) == tmp_path / files(5)[0]


def test_rng_of_another_number_of_processes_is_not_restored(tmp_path: Path) -> None:
    fit(RNGState(), IterationCheckpoint(tmp_path), batches=2)
    path = tmp_path / files(2)[0]
    content = torch.load(path, weights_only=True)
    content["rng_per_rank"] *= 2
    AtomicCheckpointIO().save_checkpoint(content, path)
    with pytest.warns(UserWarning, match="written by 2 processes, this run has 1"):
        fit(RNGState(), IterationCheckpoint(tmp_path / "b"), batches=4, resume=path)


def test_a_checkpoint_without_rng_state_warns(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path), batches=2)
    with pytest.warns(UserWarning, match="holds no random number state"):
        fit(RNGState(), IterationCheckpoint(tmp_path / "b"), batches=4, resume=tmp_path / files(2)[0])


def test_a_checkpoint_without_a_count_is_refused(tmp_path: Path) -> None:
    fit(RNGState(), ModelCheckpoint(tmp_path, filename="plain", save_top_k=-1, every_n_train_steps=1), batches=2)
    with pytest.raises(CheckpointError, match="saved without IterationCheckpoint"):
        fit(IterationCheckpoint(tmp_path), batches=4, resume=tmp_path / "plain.ckpt")


def test_generator_of_the_device_is_saved_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeDevice:
        state = torch.tensor([1, 2, 3], dtype=torch.uint8)

        def get_rng_state(self, device: torch.device) -> torch.Tensor:
            return self.state

        def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
            self.state = state

    fake = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    state = _rng_state(torch.device("xpu"))
    fake.state = torch.zeros(3, dtype=torch.uint8)
    _restore_rng(state, torch.device("xpu"))
    assert fake.state.tolist() == [1, 2, 3]


# --- whole or absent -------------------------------------------------------------------------------------------------


def test_failed_write_leaves_the_previous_checkpoint_and_ends_the_run(tmp_path: Path) -> None:
    probe = fit(IterationCheckpoint(tmp_path / "probe"), batches=2).trainer
    half = os.path.getsize(probe.callbacks[-1].last_model_path) // 2  # type: ignore[attr-defined]
    module = Tiny()
    limit = disk_full_after(half)
    module.at[4] = lambda _: limit.__enter__()
    try:
        with pytest.raises(CheckpointError, match=r"000004\.ckpt was not written: .*File too large.*GiB free there"):
            fit(IterationCheckpoint(tmp_path / "a", every_n_iterations=2), module=module)
    finally:
        limit.__exit__(None, None, None)
    assert names(tmp_path / "a") == files(1, 2)
    assert latest_valid(tmp_path / "a") == tmp_path / "a" / files(2)[0]


def test_failed_write_keeps_an_older_file_of_the_same_name(tmp_path: Path) -> None:
    path, io = tmp_path / "iteration_000001.ckpt", AtomicCheckpointIO()
    io.save_checkpoint({"w": torch.zeros(5000)}, path)
    with disk_full_after(10_000), pytest.raises(CheckpointError):
        io.save_checkpoint({"w": torch.ones(5000)}, path)
    assert names(tmp_path) == ["iteration_000001.ckpt"]
    assert torch.load(path, weights_only=True)["w"].sum() == 0


def test_a_write_that_does_not_read_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.save

    def damaged(content: Any, file: Any) -> None:
        save(content, file)
        file.seek(2000)
        file.write(b"\xff" * 8)

    monkeypatch.setattr(torch, "save", damaged)
    with pytest.raises(CheckpointError, match="checksum"):
        AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(5000)}, tmp_path / "a.ckpt")
    assert names(tmp_path) == []


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "foreign"])
def test_latest_valid_falls_back_with_a_warning(tmp_path: Path, damage: str) -> None:
    fit(IterationCheckpoint(tmp_path, every_n_iterations=2, keep=None), batches=6)
    newest = tmp_path / files(6)[0]
    content = newest.read_bytes()
    middle = len(content) // 2
    newest.write_bytes(
        {
            "truncated": content[:100],
            "empty": b"",
            "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
            "foreign": b"not a checkpoint" * 100,
        }[damage]
    )
    with pytest.warns(UserWarning, match=r"skipped: .*iteration_000006\.ckpt is not a whole checkpoint"):
        assert latest_valid(tmp_path) == tmp_path / files(4)[0]


def test_latest_valid_without_a_checkpoint(tmp_path: Path) -> None:
    assert latest_valid(tmp_path) is None
    assert latest_valid(tmp_path / "absent") is None


def test_latest_valid_ignores_what_is_still_being_written(tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(3)}, tmp_path / "iteration_000001.ckpt")
    (tmp_path / ".iteration_000002.ckpt.partial").write_bytes(b"half")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest_valid(tmp_path) == tmp_path / "iteration_000001.ckpt"


def test_verify_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent\.ckpt is not a whole checkpoint: .*No such file"):
        verify(tmp_path / "absent.ckpt")


class KilledHalfWay:
    """A file whose process dies with half of a checkpoint written."""

    def __init__(self, file: Any, most: int = 2_000_000) -> None:
        self.file, self.size, self.most = file, 0, most

    def write(self, data: Any) -> int:
        self.size += len(data)
        written = self.file.write(data)
        if self.size > self.most:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return written


def save_and_be_killed(rank: int, folder: Path) -> None:
    AtomicCheckpointIO().save_checkpoint({"w": torch.ones(1_000_000)}, folder / "iteration_000001.ckpt")
    with mock.patch.object(torch, "save", lambda content, file, save=torch.save: save(content, KilledHalfWay(file))):
        AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(1_000_000)}, folder / "iteration_000002.ckpt")


def test_kill_in_the_middle_of_a_write(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    alone = {"world_size": 1, "process_group": False, "ends": [-signal.SIGKILL]}
    run_ranks(save_and_be_killed, tmp_path, folder=tmp_path / "log", **alone)
    partial = tmp_path / ".iteration_000002.ckpt.partial"
    assert partial.stat().st_size > 1_000_000
    assert latest_valid(tmp_path) == tmp_path / "iteration_000001.ckpt"
    fit(IterationCheckpoint(tmp_path, keep=None), batches=1)
    assert not partial.exists()


# --- content ---------------------------------------------------------------------------------------------------------


def test_omegaconf_hyperparameters_are_saved_resolved(tmp_path: Path) -> None:
    config = OmegaConf.create({"lr": 1e-4, "layers": [[1, 2], {"size": "${lr}"}], "nothing": None})

    class Configured(Tiny):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.save_hyperparameters(config)

    fit(IterationCheckpoint(tmp_path), module=Configured(config), batches=1)
    content = torch.load(tmp_path / files(1)[0], weights_only=True)
    assert content["hyper_parameters"] == {"lr": 1e-4, "layers": [[1, 2], {"size": 1e-4}], "nothing": None}
    assert "hparams_type" not in content


def test_objects_in_hyperparameters_are_refused_before_training(tmp_path: Path) -> None:
    module = Tiny(reward={"terms": [object()]})
    with pytest.raises(CheckpointError, match=r"Tiny\.hparams\['reward'\]\['terms'\]\[0\] is a builtins\.object"):
        fit(IterationCheckpoint(tmp_path), module=module)
    assert module.iteration == 0


def test_objects_in_the_checkpoint_are_named(tmp_path: Path) -> None:
    module = Tiny()
    module.extra = {"policy": {"scale": np.float64(1.0)}}
    with pytest.raises(CheckpointError, match=r"checkpoint\['extra'\]\['policy'\]\['scale'\] is a numpy\.float64"):
        fit(IterationCheckpoint(tmp_path), module=module, batches=1)
    assert not tmp_path.exists() or names(tmp_path) == []


def test_plain_keeps_values_and_kinds() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    value = {"a": [1, 2.5, (True, None)], 3: {"x", "y"}, "w": weight, "d": OrderedDict(b=b"1"), "t": torch.bfloat16}
    result = plain(value)
    assert result == value and result is not value and result["w"] is weight and type(result["d"]) is OrderedDict


def test_every_kind_that_is_accepted_loads_with_weights_only(tmp_path: Path) -> None:
    value = {
        "scalars": [True, 1, 0.5, 1j, "text", b"bytes", None],
        "containers": (OrderedDict(a=1), {"b"}, {1: [2]}),
        "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu")],
    }
    AtomicCheckpointIO().save_checkpoint(value, tmp_path / "all.ckpt")
    assert torch.load(tmp_path / "all.ckpt", weights_only=True) == value


def test_plain_keeps_the_versions_of_a_state_dict() -> None:
    state = torch.nn.BatchNorm1d(2).state_dict()
    assert plain(state)._metadata == state._metadata  # type: ignore[attr-defined]


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize("value", [Colour.RED, lambda: 0, Path("a"), {Colour.RED: 1}, torch.nn.Linear(1, 1)])
def test_plain_refuses_everything_else(value: Any) -> None:
    with pytest.raises(CheckpointError, match="checkpoint"):
        plain({"a": value})


def test_every_saved_file_loads_with_weights_only(uninterrupted: tuple[Path, list[torch.Tensor]]) -> None:
    for name in names(uninterrupted[0]):
        content = torch.load(uninterrupted[0] / name, weights_only=True)
        assert plain(content).keys() == content.keys()


def test_a_writer_without_the_promise_is_refused(tmp_path: Path) -> None:
    class Other(TorchCheckpointIO):
        pass

    with pytest.raises(TypeError, match="Other, which does not promise whole files"):
        fit(IterationCheckpoint(tmp_path), plugins=[Other()])


# --- warnings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every_n_train_steps": 10}, "every_n_train_steps=10 counts optimiser steps"),
        ({}, "the whole run is one epoch"),
        ({"train_time_interval": timedelta(minutes=5)}, "ignored under manual optimisation"),
    ],
)
def test_model_checkpoint_is_warned_about(arguments: dict[str, Any], said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        assert len(warn_about_model_checkpoint([ModelCheckpoint(**arguments)])) == 1


def test_every_single_step_needs_no_warning(tmp_path: Path) -> None:
    fine = [ModelCheckpoint(every_n_train_steps=1), IterationCheckpoint(tmp_path), RNGState()]
    assert warn_about_model_checkpoint(fine) == []


# --- several processes -----------------------------------------------------------------------------------------------


def fit_on_two(
    rank: int, callback: IterationCheckpoint, module: Tiny, resume: Path | None = None
) -> list[torch.Tensor]:
    seed_everything(rank, verbose=False)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[RNGState(), callback],
    )
    trainer.fit(module, datamodule=Numbers(4), ckpt_path=resume)
    return everything(module)


def resume_and_fill_the_disk(rank: int, folder: Path) -> dict[str, Any]:
    def saving(name: str) -> IterationCheckpoint:
        return IterationCheckpoint(folder / name, every_n_iterations=2, keep=None)

    whole = fit_on_two(rank, saving("whole"), Tiny())
    resumed = fit_on_two(rank, saving("resumed"), Tiny(), resume=folder / "whole" / files(2)[0])
    with ExitStack() as stack:
        full = Tiny()
        full.at[3] = lambda _: stack.enter_context(disk_full_after(5000))
        with pytest.raises(CheckpointError) as error:
            fit_on_two(rank, saving("full"), full)
    return {"same": equal(whole, resumed), "draw": float(whole[-3][0]), "error": str(error.value)}


def test_two_ranks_resume_alike_and_fail_together(tmp_path: Path) -> None:
    """Each rank gets its own generators back, and a failed write ends both ranks instead of leaving one waiting."""
    first, second = run_ranks(resume_and_fill_the_disk, tmp_path, folder=tmp_path, process_group=False)
    assert first["same"] and second["same"] and first["draw"] != second["draw"]
    assert first["error"] == second["error"] and "was not written" in first["error"]
