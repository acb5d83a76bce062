"""A run on the CPU with every attribute of ``torch.cuda`` replaced by one that raises.

    python -m tests.accelerators.no_cuda_iteration <folder>

PyTorch, Lightning and transformers ask ``torch.cuda`` a few things on any machine (``ASKED_BY_OTHERS``); these answer
them and raise for the package. Run in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hydra
import torch

from lightning_rlhf import schema
from lightning_rlhf.assembly import assemble, make_trainer

OURS = tuple(str(Path(__file__).resolve().parents[2] / folder) for folder in ("lightning_rlhf", "callbacks"))
ASKED_BY_OTHERS = {
    *("_is_in_bad_fork", "manual_seed_all"),  # torch.manual_seed
    *("is_available", "get_rng_state_all", "set_rng_state_all"),  # Lightning's isolate_rng
    *("device_count", "empty_cache"),  # Lightning's list of accelerators, and its end of a fit
    "is_current_stream_capturing",  # transformers
}
RUN = [
    *("iterations=1", "threads=1", "warmup.steps=2", "warmup.batch_size=4", "logger=csv"),
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "callbacks=paranoid"),
    *("data.prompts_per_iteration=8", "rollout.samples=2", "module.update.minibatch_size=8"),
    *("alp=decoupled", "rollout_correction=token_tis"),
]


class Refusing(ModuleType):
    """In the place of ``torch.cuda``: every attribute raises, but for the few that others ask for."""

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(OURS) or name not in ASKED_BY_OTHERS:
            raise AssertionError(f"{caller} asked for torch.cuda.{name}")
        return getattr(REAL, name)


REAL = torch.cuda


def check_the_check() -> None:
    """Code that claims to lie in the package, and asks."""
    try:
        exec(compile("import torch; torch.cuda.is_available()", f"{OURS[0]}/module.py", "exec"))
    except AssertionError:
        return
    raise SystemExit("the stand-in lets the package ask torch.cuda")


def main(folder: str) -> None:
    torch.set_num_threads(1)
    torch.cuda = sys.modules["torch.cuda"] = Refusing("torch.cuda")  # type: ignore[assignment]
    check_the_check()
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        cache = f"warmup.cache_dir={folder}/cache"
        config = schema.check(hydra.compose("train", [f"output_dir={folder}", cache, *RUN]))
    parts = assemble(config)
    trainer = make_trainer(config)
    trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert parts.module.control.update > 0
    assert list((Path(folder) / "checkpoints").glob("*.ckpt"))
    print(f"{len(vars(REAL))} attributes replaced")


if __name__ == "__main__":
    main(sys.argv[1])
