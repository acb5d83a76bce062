"""The report of a crash: one page for people, and the same as JSON, in ``crashes/`` of the run's folder."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from lightning_rlhf import __version__, passwords
from lightning_rlhf.files import write_whole
from lightning_rlhf.supervise import files

FOLDER = "crashes"
_PACKAGES = ("torch", "lightning", "transformers", "hydra-core", "mlflow", "vllm", "ray")
_SHOWN = (
    "reward/mean", "reward/std", "kl/ref", "kl/old", "kl/coefficient", "entropy/mean", "grad_norm/actor",
    "grad_norm/critic", "ppo/clip_fraction", "ppo/ratio_max", "ppo/steps_skipped", "lr/actor", "response/length_mean",
    "perf/tokens_per_second",
)  # fmt: skip
"""Metrics of the page; the JSON has all."""


def write(folder: Path, content: Mapping[str, Any]) -> Path:
    """Write both files.

    Args:
        folder: of the run.
        content: see :func:`page` for the keys.

    Returns:
        The page.
    """
    name = f"attempt_{content['attempt']:02d}"
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    files.write(target / f"{name}.json", dict(content))
    write_whole(target / f"{name}.md", page(content))
    return target / f"{name}.md"


def page(content: Mapping[str, Any]) -> str:
    """The report in Markdown."""
    lines = [
        f"# Attempt {content['attempt']}: {content['class']} in iteration {content['iteration']}",
        "",
        f"- run: `{content['run']}`",
        f"- command: `lightning-rlhf train {shlex.join(content['words'])}`",
        f"- began from: {_code(content['began_from']) or 'the beginning'}",
        f"- ended: {content['time']}, in stage {content['stage']!r}, exit code {content['exit_code']}",
        f"- class: {content['class']} ({content['meaning']})",
        f"- marked as suspect: {_code(content['suspect']) or 'no checkpoint'}",
        f"- **next: {content['next']}**",
        "",
        "## The error",
        "",
        *_fenced(content["error"]),
    ]
    if content.get("traceback"):
        lines += ["", "## Traceback", "", *_fenced(content["traceback"])]
    if content.get("stacks"):
        lines += ["", "## Stacks of the threads when it was killed", "", *_fenced(content["stacks"])]
    lines += ["", "## All attempts", "", "| attempt | from iteration | settings changed | ended | next |"]
    lines += ["| --- | --- | --- | --- | --- |", *map(_row, content["history"])]
    lines += ["", f"## Last metrics (iteration {content['measured']})", ""]
    shown = [f"- {name}: {_number(content['metrics'][name])}" for name in _SHOWN if name in content["metrics"]]
    lines += shown or ["none: no iteration was finished"]
    lines += ["", "## Decisions of callbacks in the last iterations", ""]
    decisions = [f"- iteration {row['iteration']}: {row['verb']}: {row['reason']}" for row in content["decisions"]]
    lines += decisions or ["none"]
    lines += ["", "## Environment", "", *(f"- {name}: {value}" for name, value in content["environment"].items())]
    lines += ["", f"## End of the log (`{content['log']}`)", "", *_fenced(content["log_tail"])]
    return passwords.hidden("\n".join(lines) + "\n")


def _code(value: object) -> str:
    return f"`{value}`" if value else ""


def _fenced(text: str) -> list[str]:
    return ["````", text.rstrip("\n"), "````"]


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _row(attempt: Mapping[str, Any]) -> str:
    changes = ", ".join(f"{key}={value}" for key, value in attempt["changes"].items()) or "none"
    ended = f"{attempt['class']} in iteration {attempt['iteration']}" if "class" in attempt else "running"
    cells = [attempt["attempt"], attempt["from"], changes, ended, attempt.get("next", "")]
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# --- what it is made of ----------------------------------------------------------------------------------------------


def log_tail(file: Path, lines: int) -> str:
    """The last lines of a log; empty without one."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - 400 * max(lines, 1)))
            text = opened.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
    return passwords.hidden("\n".join(text.splitlines()[-lines:] if lines else []))


def stacks(folder: Path) -> str:
    """The stacks that hanging processes have written."""
    texts = [(path.stem, path.read_text(encoding="utf-8", errors="replace")) for path in folder.glob("stacks_*.txt")]
    return "\n".join(f"{name}\n{text}" for name, text in sorted(texts) if text)


def hidden_words(words: Sequence[str]) -> list[str]:
    """The words of a command without passwords."""
    return [passwords.hidden_word(word) for word in words]


def environment() -> dict[str, str]:
    """Versions, machine, devices and, of the current folder, the git commit; no environment variable but devices."""
    found = {"lightning_rlhf": __version__, "python": sys.version.split()[0]}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    found |= {"machine": platform.node(), "system": platform.platform(), "CPUs": str(os.cpu_count())}
    with suppress(OSError, ValueError):
        found["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        if name in os.environ:
            found[name] = os.environ[name]
    commit = _git("rev-parse", "HEAD")
    if commit:
        found["git commit"] = commit + (" with changes" if _git("status", "--porcelain", "-uno") else "")
    return found


def _git(*words: str) -> str:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
