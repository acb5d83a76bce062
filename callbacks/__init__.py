"""Stability behaviours, one per file; imported as ``lightning_rlhf.callbacks``."""

if __name__ != "lightning_rlhf.callbacks":
    # From the repository's root `import callbacks` would find this folder and make a second copy of every class.
    raise ImportError("import lightning_rlhf.callbacks instead of callbacks")

from lightning_rlhf.callbacks.adaptive_kl import AdaptiveKL
from lightning_rlhf.callbacks.adaptive_ptx import AdaptivePTX
from lightning_rlhf.callbacks.advantage_vanish import AdvantageVanish
from lightning_rlhf.callbacks.alp_figures import ALPFigures
from lightning_rlhf.callbacks.base import RLHFCallback
from lightning_rlhf.callbacks.calibrate import Calibrate, CalibrationError
from lightning_rlhf.callbacks.clip_fraction_break import ClipFractionBreak
from lightning_rlhf.callbacks.efficiency_stop import EfficiencyStop
from lightning_rlhf.callbacks.gradient_monitor import GradientMonitor
from lightning_rlhf.callbacks.kl_early_stop import KLEarlyStop
from lightning_rlhf.callbacks.kl_guard import KLGuard
from lightning_rlhf.callbacks.length_curriculum import LengthCurriculum
from lightning_rlhf.callbacks.lr_backoff import LRBackoff
from lightning_rlhf.callbacks.oom_guard import OOMGuard
from lightning_rlhf.callbacks.overoptimisation_stop import OveroptimisationStop
from lightning_rlhf.callbacks.prompt_monitor import PromptMonitor
from lightning_rlhf.callbacks.prompt_records import PromptRecords
from lightning_rlhf.callbacks.samples_table import SamplesTable

__all__ = [
    "ALPFigures",
    "AdaptiveKL",
    "AdaptivePTX",
    "AdvantageVanish",
    "Calibrate",
    "CalibrationError",
    "ClipFractionBreak",
    "EfficiencyStop",
    "GradientMonitor",
    "KLEarlyStop",
    "KLGuard",
    "LRBackoff",
    "LengthCurriculum",
    "OOMGuard",
    "OveroptimisationStop",
    "PromptMonitor",
    "PromptRecords",
    "RLHFCallback",
    "SamplesTable",
]
