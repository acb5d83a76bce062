"""Lightning strategies for several devices, with the settings that suit the update of this package."""

from __future__ import annotations

from datetime import timedelta

from lightning.pytorch import strategies

from lightning_rlhf.settings import SettingError


class DDPStrategy(strategies.DDPStrategy):
    """A whole copy of the model on every device (DistributedDataParallel).

    Gradients lie in the buffers they are sent from, which saves a copy of them.

    Args:
        process_group_backend: of ``torch.distributed``; ``None`` is what PyTorch has for the device (nccl, gloo).
        timeout_seconds: after which a process that waits for another gives up.

    Raises:
        SettingError: a setting is out of range.
    """

    def __init__(self, *, process_group_backend: str | None = None, timeout_seconds: float = 1800) -> None:
        super().__init__(
            process_group_backend=process_group_backend,
            timeout=process_group_timeout(timeout_seconds),
            gradient_as_bucket_view=True,
        )


def process_group_timeout(seconds: float) -> timedelta:
    """The timeout of the process group.

    Raises:
        SettingError: it is not a positive number.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
        raise SettingError("trainer.strategy.timeout_seconds", seconds, "a number > 0")
    return timedelta(seconds=seconds)
