"""A checkpoint is verified before it counts: bits, shapes, finite tensors, and answers of a policy loaded from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf import __version__
from lightning_rlhf.assembly import find_checkpoint
from lightning_rlhf.checkpoint import AtomicCheckpointIO, CheckpointError, IterationCheckpoint, latest_valid, verify
from lightning_rlhf.checkpoint.files import remove
from lightning_rlhf.checkpoint.records import SUSPECT, VERIFIED, is_verified, problem_of, read_record, record_of
from lightning_rlhf.checkpoint.retention import checkpoints_in, superseded
from lightning_rlhf.checkpoint.verification import all_finite, problem_in
from lightning_rlhf.errors import InputError
from tests import support
from tests.checkpoint.test_callback import Tiny, files, fit, quiet  # noqa: F401

# --- bits ------------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def test_the_record_says_what_was_checked(tmp_path: Path) -> None:
    fit(IterationCheckpoint(tmp_path), batches=2)
    record = json.loads((tmp_path / "iteration_000002.verified.json").read_text(encoding="utf-8"))
    path = tmp_path / files(2)[0]
    assert record.pop("sha256") and record == {
        "bytes": path.stat().st_size,
        "iteration": 2,
        "checked": ["checksums", "shapes", "finite weights", "finite optimiser state"],
        "lightning_rlhf": __version__,
    }


@pytest.mark.parametrize("where", ["a weight", "padding", "the last byte"])
def test_one_flipped_bit_is_found_wherever_it_is(tmp_path: Path, where: str) -> None:
    """Padding between the entries of the archive has no checksum of its own: only the record finds that."""
    fit(IterationCheckpoint(tmp_path, every_n_iterations=2, keep=None), batches=4)
    older, newest = (tmp_path / name for name in files(2, 4))
    content = newest.read_bytes()
    weight = torch.load(newest, weights_only=True)["state_dict"]["layer_in.weight"].numpy().tobytes()
    at = {"a weight": content.find(weight) + 5, "padding": content.find(b"Z" * 20) + 9, "the last byte": -1}
    assert content.find(weight) > 0 and content.find(b"Z" * 20) > 0
    flip(newest, at[where])
    with pytest.raises(CheckpointError, match=r"size or checksum are not those in iteration_000004\.verified\.json"):
        verify(newest)
    with pytest.raises(InputError, match=r"resume = .*iteration_000004\.ckpt' is damaged"):
        find_checkpoint(str(newest), "resume")
    with pytest.warns(UserWarning, match=r"skipped: .*iteration_000004\.ckpt"):
        assert latest_valid(tmp_path) == older


def test_without_or_with_a_broken_record_a_whole_file_counts(tmp_path: Path) -> None:
    """As those of a run that was killed before it could write one; checksums of its entries are compared then."""
    fit(IterationCheckpoint(tmp_path), batches=2)
    path = tmp_path / files(2)[0]
    record_of(path, VERIFIED).write_text("{", encoding="utf-8")
    with pytest.warns(UserWarning, match=r"verified\.json cannot be used"):
        assert latest_valid(tmp_path) == path
    record_of(path, VERIFIED).unlink()
    assert latest_valid(tmp_path) == path and not is_verified(path)
    flip(path, path.stat().st_size // 2)
    with pytest.raises(CheckpointError, match="checksum"):
        verify(path)


def test_records_go_with_their_checkpoint(tmp_path: Path) -> None:
    """Also those that others have put beside it; never those of another checkpoint."""
    fit(IterationCheckpoint(tmp_path, every_n_iterations=1, keep=None), batches=3)
    for kind in (SUSPECT, "mine"):
        record_of(tmp_path / files(2)[0], kind).write_text("{}", encoding="utf-8")
    (tmp_path / "iteration_000002_notes.json").touch()
    remove(tmp_path / files(2)[0])
    left = [*files(1, 3), "iteration_000001.verified.json", "iteration_000003.verified.json"]
    assert sorted(os.listdir(tmp_path)) == sorted([*left, "iteration_000002_notes.json"])


# --- tensors ---------------------------------------------------------------------------------------------------------


def overflow(module: Tiny) -> None:
    """Second moments that are infinite make steps of 0: the weights stay finite, and never move again."""
    optimizer: Any = module.optimizers()
    for state in optimizer.optimizer.state.values():
        state["exp_avg_sq"].fill_(torch.inf)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_checkpoint_is_no_good_one_and_training_goes_on(tmp_path: Path, asynchronous: bool) -> None:
    module = Tiny()
    module.at[4] = overflow
    callback = IterationCheckpoint(tmp_path, 1, keep=2, monitor="score", asynchronous=asynchronous)
    with pytest.warns(UserWarning, match=r"000004\.ckpt FAILED its verification: optimizer_states\.0\.state\.0\.exp_a"):
        fit(callback, module=module, log_every_n_steps=1)
    assert module.iteration == 8
    assert [path.name for path in checkpoints_in(tmp_path)] == files(3, 7, 8), "the newest two, and the newest good one"
    assert [is_verified(path) for path in checkpoints_in(tmp_path)] == [True, False, False]
    assert callback.last_model_path == str(tmp_path / files(3)[0])
    assert callback.best_model_score == 0.0, "the 3 of iteration 4 has no good checkpoint"
    assert "exp_avg_sq holds NaN or infinity" in str(problem_of(tmp_path / files(8)[0]))
    with pytest.warns(UserWarning, match=r"skipped: .*000008\.ckpt failed its verification"):
        assert latest_valid(tmp_path) == tmp_path / files(3)[0]
    assert find_checkpoint(str(tmp_path / files(8)[0])) == tmp_path / files(8)[0], "it can be named"


def test_the_newest_verified_and_unsuspected_is_never_removed(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in files(1, 2, 3, 4)]
    for path in paths:
        AtomicCheckpointIO().save_checkpoint({"w": torch.zeros(2)}, path)
    assert superseded(paths, 1) == paths[:3]
    record_of(paths[3], SUSPECT).touch()
    assert superseded(paths, 1) == paths[:2]
    record_of(paths[2], VERIFIED).unlink()
    assert superseded(paths, 1, {str(paths[0])}) == [paths[2]]
    assert superseded(paths, None) == []


def test_what_differs_from_memory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.ckpt"
    torch.save({"state_dict": {"w": torch.ones(2, 3), "b": torch.ones(2)}}, path)
    wanted = {"w": torch.ones(2, 3), "b": torch.ones(2)}
    assert problem_in(path, {"state_dict": wanted}) is None
    assert "state_dict.c first" in str(problem_in(path, {"state_dict": wanted | {"c": torch.ones(1)}}))
    said = problem_in(path, {"state_dict": wanted | {"w": torch.ones(3, 2)}})
    assert said == "state_dict.w is 2 x 3 (float32) in it and 3 x 2 (float32) in memory"
    assert "bfloat16" in str(problem_in(path, {"state_dict": wanted | {"b": torch.ones(2, dtype=torch.bfloat16)}}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64])
def test_finite_in_every_type(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    assert all_finite([tensor, torch.ones(0), torch.arange(3)]) and all_finite([])
    broken = torch.ones(3, 5)
    broken[1, 2] = torch.nan
    assert not all_finite([tensor, broken.to(dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_elements_are_finite_and_an_infinity_beside_them_is_not(dtype: torch.dtype) -> None:
    """Their squares, and so the norm, are infinite."""
    large = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert not torch.linalg.vector_norm(large).isfinite() and all_finite([large])
    large[7] = -torch.inf
    assert not all_finite([torch.ones(3), large])


def test_a_mask_may_be_infinite(tmp_path: Path) -> None:
    module = Tiny()
    module.register_buffer("mask", torch.full((2,), -torch.inf))
    fit(IterationCheckpoint(tmp_path), module=module, batches=1)
    assert is_verified(tmp_path / files(1)[0])


# --- answers ---------------------------------------------------------------------------------------------------------


class Loses(AtomicCheckpointIO):
    """Writes another weight than it was given, whole and finite."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        state = dict(checkpoint["state_dict"])
        state["actor.lm.lm_head.weight"] = -state["actor.lm.lm_head.weight"]
        super().save_checkpoint(checkpoint | {"state_dict": state}, path, storage_options)


def probed(folder: Path, probe: int | None = 3, **trainer: Any) -> tuple[dict[str, torch.Tensor], IterationCheckpoint]:
    module, saver = support.tiny_module(iterations=3), IterationCheckpoint(folder, 1, probe=probe)
    support.fit(module, [saver], folder=folder, enable_checkpointing=True, **trainer)
    return support.weights(module), saver


def test_a_policy_loaded_from_the_file_answers_as_the_live_one(tmp_path: Path) -> None:
    trained, saver = probed(tmp_path / "a")
    record = read_record(Path(saver.last_model_path), VERIFIED)
    assert record is not None and record["checked"][-1] == "greedy answers to 3 prompts" and record["iteration"] == 3
    verify(saver.last_model_path)
    assert support.same(trained, probed(tmp_path / "b", None)[0]), "asking changes nothing"


def test_a_policy_that_answers_otherwise_is_a_failed_verification(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"FAILED its verification: a policy loaded from it answers \d of 3 prompts"):
        _, saver = probed(tmp_path, plugins=[Loses()])
    assert saver.last_model_path == "" and latest_valid(tmp_path) is None


def test_what_has_no_policy_cannot_be_probed(tmp_path: Path) -> None:
    from lightning import LightningModule

    from lightning_rlhf.checkpoint.probe import _hindrance

    assert "no policy" in str(_hindrance(LightningModule()))


def test_a_probe_that_does_not_fit_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_rlhf.checkpoint.probe.free_host_memory", lambda: 1000)
    with pytest.warns(UserWarning, match=r"probe = 3 checks nothing from here on: a second policy needs") as heard:
        _, saver = probed(tmp_path)
    assert sum("checks nothing" in str(warning.message) for warning in heard) == 1
    assert is_verified(Path(saver.last_model_path))
