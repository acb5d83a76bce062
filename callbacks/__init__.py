"""Stability behaviours, one per file; imported as ``lightning_rlhf.callbacks``."""

if __name__ != "lightning_rlhf.callbacks":
    # From the repository's root `import callbacks` would find this folder and make a second copy of every class.
    raise ImportError("import lightning_rlhf.callbacks instead of callbacks")

from lightning_rlhf.callbacks.adaptive_kl import AdaptiveKL
from lightning_rlhf.callbacks.alp_figures import ALPFigures
from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.gradient_monitor import GradientMonitor
from lightning_rlhf.callbacks.kl_early_stop import KLEarlyStop
from lightning_rlhf.callbacks.samples_table import SamplesTable

__all__ = ["ALPFigures", "AdaptiveKL", "GradientMonitor", "KLEarlyStop", "RLHFCallback", "SamplesTable"]
