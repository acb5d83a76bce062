"""Only listed messages are silenced, and only inside the context."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from lightning_rlhf import quiet


def test_own_warnings_are_shown_as_their_text_and_others_with_their_place():
    before = warnings.formatwarning
    with quiet.own_warnings_in_words():
        own = warnings.formatwarning("not logged", UserWarning, str(quiet.PACKAGE / "callbacks" / "x.py"), 7)
        other = warnings.formatwarning("deprecated", UserWarning, "/site-packages/other/y.py", 9)
    assert warnings.formatwarning is before
    assert own == "warning: not logged\n"
    assert other.startswith("/site-packages/other/y.py:9: ")


def test_a_skipped_checkpoint_is_said_without_a_line_of_code(tmp_path: Path) -> None:
    """In a process of its own: Lightning sets the form of warnings when it is imported, and pytest records them."""
    (tmp_path / "iteration_000001.ckpt").write_bytes(b"damaged")
    code = f"from lightning_rlhf.checkpoint import latest_valid; latest_valid({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.startswith(f"warning: skipped: {tmp_path}/iteration_000001.ckpt is not a whole checkpoint")


@pytest.mark.parametrize("name", quiet.LOGGERS)
def test_listed_log_records_are_dropped_and_others_are_not(name, caplog):
    log = logging.getLogger(name)
    with caplog.at_level(logging.INFO):
        with quiet.quiet():
            log.info("GPU available: False, used: False")
            log.info("GPU available: True, used: False")
            log.info("generated new fontManager")
        log.info("💡 Tip: afterwards")
    assert [record.getMessage()[:19] for record in caplog.records] == ["GPU available: True", "💡 Tip: afterwards"]


@pytest.mark.parametrize(
    ("message", "heard"),
    [
        ("`isinstance(treespec, LeafSpec)` is deprecated, use something else", 0),
        ("Found 61 module(s) in eval mode at the start of training. This may lead to surprises.", 0),
        ("The 'train_dataloader' does not have many workers which may be a bottleneck.", 0),
        ("Total length of `ValidationLoader` across ranks is zero. Please make sure this was your intention.", 0),
        ("Total length of `DataLoader` across ranks is zero. Please make sure this was your intention.", 1),
        ("loss is NaN", 1),
    ],
)
def test_listed_warnings_are_dropped_and_others_are_not(message, heard):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with quiet.quiet():
            warnings.warn(message, stacklevel=1)
    assert len(caught) == heard


def test_lightning_leaves_its_records_to_the_root_logger():
    log = logging.getLogger("lightning")
    before = list(log.handlers)
    try:
        log.addHandler(logging.NullHandler())
        quiet.log_once()
        assert log.handlers == []
    finally:
        log.handlers[:] = before


def test_processes_of_ray_keep_their_errors_whatever_level_ray_sets(caplog):
    log = logging.getLogger("ray.train.v2._internal.callbacks.backend_setup")
    filters = list(log.filters)
    try:
        quiet.quiet_ray()
        with caplog.at_level(logging.DEBUG, log.name):
            log.warning("expected")
            log.error("not expected")
    finally:
        log.filters[:] = filters
    assert [record.getMessage() for record in caplog.records] == ["not expected"]


def test_no_progress_bars_for_weights_read_from_disk(tmp_path, capsys):
    from transformers.utils import logging as messages

    from lightning_rlhf.models import build_tiny, load_pretrained

    tiny = build_tiny("01+=", hidden_size=32, layers=1, heads=2)
    tiny.lm.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    messages.enable_progress_bar()
    try:
        load_pretrained(str(tmp_path))
        assert "Loading weights" in capsys.readouterr().err
        quiet.quiet_loading()
        load_pretrained(str(tmp_path))
        assert capsys.readouterr().err == ""
    finally:
        messages.enable_progress_bar()


def test_a_level_of_messages_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
    quiet.quiet_libraries()
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
    quiet.quiet_libraries()
    assert os.environ.pop("TORCH_CPP_LOG_LEVEL") == "ERROR"
