"""Names of the variants that a setting chooses from; in a file of their own, so that settings need not import torch."""

from __future__ import annotations

from typing import Literal

KLEstimator = Literal["k1", "k2", "k3", "abs"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
RatioLevel = Literal["token", "sequence"]
DType = Literal["float32", "bfloat16", "float16"]
EngineDType = Literal["auto", "float32", "bfloat16", "float16"]
