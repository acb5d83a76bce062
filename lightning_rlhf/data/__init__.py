"""Data: sources of rows, prompts made from them, and the data module that serves them in batches."""

from lightning_rlhf.data.corpus import TextSource
from lightning_rlhf.data.datamodule import PromptDataModule
from lightning_rlhf.data.lengths import check_room
from lightning_rlhf.data.loaders import PromptLoader, PromptStream
from lightning_rlhf.data.prompts import Prompt, PromptEncoder
from lightning_rlhf.data.sources import DataError, HFDatasetSource, JSONLSource, ParquetSource, open_source

__all__ = [
    "DataError",
    "HFDatasetSource",
    "JSONLSource",
    "ParquetSource",
    "Prompt",
    "PromptDataModule",
    "PromptEncoder",
    "PromptLoader",
    "PromptStream",
    "TextSource",
    "check_room",
    "open_source",
]
