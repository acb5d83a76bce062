"""The commands and examples of README and docs work."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_rlhf import schema
from lightning_rlhf.accelerators import npu
from lightning_rlhf.experience import MiniBatch
from lightning_rlhf.functional.losses import PolicyLoss
from lightning_rlhf.metrics import names
from lightning_rlhf.ppo import PPOModule
from lightning_rlhf.rewards import RewardBatch
from tests.support import fit, tiny_module

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture(autouse=True)
def own_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples of the docs register metrics, which other tests must not find."""
    monkeypatch.setattr(names, "METRICS", list(names.METRICS))


def blocks(language: str, page: Path) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def commands(start: str) -> list[str]:
    """Lines of shell blocks that begin with ``start``, continuation lines joined, comments removed."""
    lines = []
    for page in PAGES:
        for block in blocks("bash", page):
            lines += [line.split("  #")[0].strip() for line in block.replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith(start)})


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    named = {line.split()[1] for line in commands("make ")}
    assert {"quickstart", "test"} <= named
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in named)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert re.search(
        r"^make test \|\| tests=\$\?$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), flags=re.MULTILINE
    )


def test_relative_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def composable() -> list[str]:
    """Commands without a user's own folders or an earlier run, which tests/test_cli.py covers."""
    return [line for line in commands("lightning-rlhf train") if not re.search("--config-dir|--multirun|resume=", line)]


@pytest.mark.parametrize("command", composable())
def test_train_commands_compose(command: str, compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Commands for NPUs are checked as on a machine that has some.
    monkeypatch.setattr(npu, "missing", lambda: None)
    monkeypatch.setattr(npu.NPUAccelerator, "auto_device_count", staticmethod(lambda: 8))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2, encoding="utf-8")
    for text in ("corpus.jsonl", "corpus.parquet", "texts/a.txt"):
        (tmp_path / text).parent.mkdir(exist_ok=True)
        (tmp_path / text).touch()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    overrides = [word for word in shlex.split(command) if "=" in word]
    overrides = [word.replace("my/model", str(tmp_path / "model")) for word in overrides]
    overrides = [word.replace("prompts.jsonl", str(tmp_path / "prompts.jsonl")) for word in overrides]
    module = install_parts()
    try:
        assert schema.check(compose(*overrides))["iterations"] > 0
    finally:
        del sys.modules[module.__name__]


def install_parts() -> ModuleType:
    """``my_parts.py`` of the docs, with all its blocks in one module."""
    module = ModuleType("my_parts")
    for page in ("extending.md", "ptx.md", "overoptimisation.md"):
        for block in blocks("python", ROOT / "docs" / page):
            exec(compile(block, page, "exec"), module.__dict__)
    sys.modules["my_parts"] = module
    return module


def test_the_examples_of_the_docs_run() -> None:
    parts = install_parts()
    try:
        module = tiny_module(cls=parts.UnclippedModule, iterations=3, reward=parts.brevity)
        fit(module, [parts.StopWhenSolved(score=0.5)])
        assert module.control.iteration == 1, "every answer is brief: solved in the first iteration"
        assert "mean score 1.000 over 0.5" in (module.control.training_stopped or "")
    finally:
        del sys.modules["my_parts"]


def test_the_unclipped_example_is_the_surrogate_objective() -> None:
    """Within the clip range loss and gradient equal those of PPO, beyond it those of the unclipped ratio."""
    seen: dict[str, list[tuple[float, float, float]]] = {"within": [], "beyond": []}
    parts: Any = install_parts()

    class Compared(parts.UnclippedModule):
        def policy_loss(self, minibatch: MiniBatch, logprobs: Tensor) -> PolicyLoss:
            away = torch.linspace(-1.0, 1.0, logprobs.numel()).reshape(logprobs.shape)
            mask = minibatch.require("loss_mask")
            for place, size in (("within", 0.1), ("beyond", 2.0)):
                moved = (minibatch.require("old_logprobs") + size * away).requires_grad_()
                losses = [cls.policy_loss(self, minibatch, moved).loss for cls in (parts.UnclippedModule, PPOModule)]
                mine, theirs = (torch.autograd.grad(loss, moved)[0] for loss in losses)
                ratio = torch.exp(size * away)
                plain = -(ratio * minibatch.require("advantages") * mask).sum() / mask.sum()
                assert losses[0].item() == pytest.approx(plain.item(), rel=1e-5)
                seen[place].append((losses[0].item(), losses[1].item(), float((mine - theirs).abs().max())))
            return super().policy_loss(minibatch, logprobs)

    try:
        fit(tiny_module(cls=Compared, iterations=1, update={"epochs": 1, "minibatch_size": 8}))
    finally:
        del sys.modules["my_parts"]
    assert len(seen["within"]) == len(seen["beyond"]) == 2
    for mine, theirs, apart in seen["within"]:
        assert abs(mine) > 1e-3 and mine == pytest.approx(theirs, rel=1e-5) and apart < 1e-7
    assert all(mine != pytest.approx(theirs, rel=1e-2) and apart > 1e-3 for mine, theirs, apart in seen["beyond"])


def test_a_reward_batch_is_what_the_docs_say() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`batch\.(\w+)`", page))
    assert named == set(RewardBatch.__dataclass_fields__)
