"""Reinforcement learning of language models on PyTorch Lightning, Hydra and MLflow.

The parts are imported from where they live (``lightning_rlhf.module``, ``lightning_rlhf.callbacks``, ...), so that
``import lightning_rlhf`` and ``lightning-rlhf --help`` cost nothing.
"""

__version__ = "0.1.0"
