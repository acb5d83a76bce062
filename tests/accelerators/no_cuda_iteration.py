"""A run on the CPU with every attribute of ``torch.cuda`` replaced by one that raises.

    python -m tests.accelerators.no_cuda_iteration <folder>

PyTorch and Lightning themselves ask ``torch.cuda`` a few things on any machine (``ASKED_BY_OTHERS``); these answer them
and raise for everyone else. Run in a process of its own.
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
ASKED_BY_OTHERS: dict[str, Any] = {}
"""What PyTorch and Lightning call on a machine without a GPU."""
RUN = [
    *("iterations=1", "threads=1", "warmup.steps=2", "warmup.batch_size=4", "logger=csv"),
    *("trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "callbacks=paranoid"),
    *("data.prompts_per_iteration=8", "rollout.samples=2", "module.update.minibatch_size=8"),
    *("alp=decoupled", "rollout_correction=token_tis"),
]


class Raises:
    """Raises whatever is done with it."""

    def __init__(self, name: str, original: Any) -> None:
        self.__dict__.update(_name=name, _original=original)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if caller.startswith(OURS) or self._name not in ASKED_BY_OTHERS:
            raise AssertionError(f"{caller} asked torch.cuda.{self._name}")
        return self._original(*args, **kwargs)

    __call__ = __getattr__ = __bool__ = __iter__ = __eq__ = __len__ = _refuse  # type: ignore[assignment]
    __hash__ = object.__hash__


def replace_all() -> int:
    """Replace every public attribute of ``torch.cuda`` and of its modules; how many."""
    count = 0
    for name, value in list(vars(torch.cuda).items()):
        if isinstance(value, ModuleType) or name.startswith("__"):
            continue
        setattr(torch.cuda, name, Raises(name, value))
        count += 1
    return count


def main(folder: str) -> None:
    torch.set_num_threads(1)
    count = replace_all()
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):
        cache = f"warmup.cache_dir={folder}/cache"
        config = schema.check(hydra.compose("train", [f"output_dir={folder}", cache, *RUN]))
    parts = assemble(config)
    trainer = make_trainer(config)
    trainer.validate(parts.module, datamodule=parts.datamodule, verbose=False)
    trainer.fit(parts.module, datamodule=parts.datamodule)
    assert parts.module.control.update > 0
    assert list((Path(folder) / "checkpoints").glob("*.ckpt"))
    print(f"{count} attributes replaced")


if __name__ == "__main__":
    main(sys.argv[1])
