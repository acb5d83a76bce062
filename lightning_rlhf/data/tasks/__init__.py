"""Built-in verifiable tasks: sources that make up their rows, each with the right answer."""

from lightning_rlhf.data.tasks.arithmetic import ArithmeticTask

__all__ = ["ArithmeticTask"]
