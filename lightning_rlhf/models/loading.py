"""Language models from a folder, the Hugging Face hub, a GGUF file or an installed Python package."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from lightning_rlhf.functional.choices import DType
from lightning_rlhf.model_paths import ADAPTER, absent, folder_fault, listing

PACKAGE_SCHEME = "package://"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ALLOWED = (
    "a folder with config.json, a .gguf file, a hub id such as 'organisation/name', "
    "or package://<python package>/<file or folder inside it>"
)


@dataclass
class LoadedModel:
    """A causal language model, its tokenizer, and where they came from (for logs and reports)."""

    lm: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str


def load_pretrained(
    path: str,
    *,
    gguf_file: str | None = None,
    dtype: DType = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    eos_token: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> LoadedModel:
    """Load any Hugging Face causal language model, dropout switched off.

    Args:
        path: A folder, a ``.gguf`` file, a hub id, or ``package://<python package>/<path inside it>``.
        gguf_file: Name of the GGUF file inside ``path``, where ``path`` is a folder or a hub id. GGUF weights are
            de-quantised, so that they can be trained.
        dtype: ``float32``, ``bfloat16`` or ``float16``.
        attn_implementation: ``sdpa``, ``eager``, ``flash_attention_2``, ...; ``None`` leaves the choice to the
            architecture (sdpa where it is supported).
        trust_remote_code: Run modelling code that comes with the checkpoint.
        chat_template: Jinja text, or a file that holds it; replaces the tokenizer's own.
        eos_token: End token, one of the vocabulary; replaces the tokenizer's own.
        tokenizer: What :func:`load_tokenizer` gave for the same arguments; ``None``: it is loaded here.

    Raises:
        ValueError: The path leads nowhere, or tokenizer and model cannot be used together; names key and value.
    """
    _check_dtype(dtype)
    if tokenizer is None:
        tokenizer = load_tokenizer(
            path,
            gguf_file=gguf_file,
            trust_remote_code=trust_remote_code,
            chat_template=chat_template,
            eos_token=eos_token,
        )
    folder, gguf_file = resolve_path(path, gguf_file)
    options: dict[str, Any] = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if gguf_file is not None:
        options |= _gguf_options(gguf_file)
    with _loading(path):
        lm = AutoModelForCausalLM.from_pretrained(folder, **options)
    if gguf_file is not None:
        _forget_quantisation(lm)
    disable_dropout(lm)
    if eos_token is not None and lm.generation_config is not None:
        lm.generation_config.eos_token_id = tokenizer.eos_token_id
    embedding: Any = lm.get_input_embeddings()
    tokens, rows = len(tokenizer.get_vocab()), embedding.weight.shape[0]
    if tokens > rows:
        raise ValueError(f"the tokenizer of {path!r} has {tokens} tokens, its model only {rows} embeddings")
    return LoadedModel(lm, tokenizer, source=path)


def load_tokenizer(
    path: str,
    *,
    gguf_file: str | None = None,
    dtype: DType = "float32",
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    eos_token: str | None = None,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights: data can be read with it while nothing large is in memory.

    Args:
        path: As for :func:`load_pretrained`.
        gguf_file: As there.
        dtype: Of the weights; only checked, so that both functions take the same configuration block.
        attn_implementation: Ignored here.
        trust_remote_code: As there.
        chat_template: As there.
        eos_token: As there.

    Raises:
        ValueError: The path leads nowhere, or there is no such end token or template; names key and value.
    """
    _check_dtype(dtype)
    folder, gguf_file = resolve_path(path, gguf_file)
    with _loading(path):
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, trust_remote_code=trust_remote_code)
    _prepare_tokenizer(tokenizer, path, chat_template, eos_token)
    return tokenizer


@contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ValueError(f"model path = {path!r} cannot be loaded: {error}") from error


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"model dtype = {dtype!r} is not allowed: one of {', '.join(DTYPES)}")


def resolve_path(path: str, gguf_file: str | None = None) -> tuple[str, str | None]:
    """Where to load from: a folder or hub id, and the GGUF file in it, if any.

    Raises:
        ValueError: Nothing is there. A path that can only be local is refused without a network request.
    """
    if path.startswith(PACKAGE_SCHEME):
        local = _inside_package(path)
    else:
        local = Path(path).expanduser()
        if not path or not local.exists():
            if (fault := absent(path)) is not None:
                raise _no_model(path, fault)
            return path, gguf_file
    if local.is_file():
        if local.suffix != ".gguf":
            raise _no_model(path, "it is a file, but not a .gguf file")
        return str(local.parent), local.name
    if gguf_file is not None:
        if not (local / gguf_file).is_file():
            raise ValueError(f"model gguf_file = {gguf_file!r} is not in {path!r}; {listing(local)}")
    elif (fault := folder_fault(local)) is not None:
        if (local / ADAPTER).is_file():
            hint = "it is a LoRA adapter: load its base model and name it as lora.adapter"
            fault = f"the folder has no config.json; {hint}"
        raise _no_model(path, fault)
    return str(local), gguf_file


def _inside_package(path: str) -> Path:
    package, _, inside = path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise _no_model(path, f"the Python package {package!r} is not installed")
    for root in spec.submodule_search_locations:
        candidate = Path(root) / inside
        if candidate.exists():
            return candidate
    root = next(iter(spec.submodule_search_locations))
    raise _no_model(path, f"the package {package!r} has no {inside!r}; {listing(Path(root))}")


def _no_model(path: str, why: str) -> ValueError:
    return ValueError(f"model path = {path!r}: {why}. Allowed: {_ALLOWED}")


def _gguf_options(gguf_file: str) -> dict[str, Any]:
    """Options that unpack a GGUF file: newer transformers may keep the packed blocks, which cannot be trained."""
    from transformers.utils import quantization_config

    packed = getattr(quantization_config, "GgufConfig", None)  # older versions always unpack
    return {"gguf_file": gguf_file} | ({} if packed is None else {"quantization_config": packed(dequantize=True)})


def _forget_quantisation(lm: Any) -> None:
    """Make a de-quantised model an ordinary one: transformers refuses to save it otherwise."""
    lm.hf_quantizer = None
    lm.is_quantized = False
    for owner, name in ((lm, "quantization_method"), (lm.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)


def _prepare_tokenizer(
    tokenizer: PreTrainedTokenizerBase, path: str, chat_template: str | None, eos_token: str | None
) -> None:
    """Set end token, padding token and chat template."""
    if eos_token is not None:
        if eos_token not in tokenizer.get_vocab():
            raise ValueError(f"model eos_token = {eos_token!r} is not in the vocabulary of {path!r}")
        tokenizer.eos_token = eos_token
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {path!r} has no end token: name one of its tokens as model eos_token")
    if tokenizer.pad_token_id is None:
        # No token is added: the embedding stays as it is, and masks never come from comparing ids.
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        is_file = "{" not in chat_template
        if is_file and not Path(chat_template).expanduser().is_file():
            raise ValueError(f"model chat_template = {chat_template!r}: neither Jinja text nor an existing file")
        text = Path(chat_template).expanduser().read_text(encoding="utf-8") if is_file else chat_template
        tokenizer.chat_template = text


def disable_dropout(lm: nn.Module) -> None:
    """Set every dropout rate to 0, in the configuration, in dropout modules and in attributes of other modules.

    Old and current log-probabilities must come from the same function (ratio one), so dropout stays off throughout
    reinforcement learning, in training mode too.
    """
    for owner, name, _ in _dropout_rates(lm):
        setattr(owner, name, 0.0)


def assert_no_dropout(module: nn.Module) -> None:
    """Raise RuntimeError naming the places where a dropout rate is not 0."""
    found = [f"{type(owner).__name__}.{name} = {rate}" for owner, name, rate in _dropout_rates(module)]
    if found:
        raise RuntimeError("dropout must be off in reinforcement learning: " + ", ".join(sorted(set(found))))


def _dropout_rates(module: nn.Module) -> Iterator[tuple[Any, str, float]]:
    """Every (owner, attribute, rate) that is a dropout rate above 0."""
    owners: list[Any] = list(module.modules())
    configs = {id(m.config): m.config for m in owners if hasattr(m, "config") and hasattr(m.config, "to_dict")}
    for config in list(configs.values()):
        for value in vars(config).values():  # text_config and the like
            if hasattr(value, "to_dict"):
                configs[id(value)] = value
    for owner in [*owners, *configs.values()]:
        is_dropout = isinstance(owner, nn.modules.dropout._DropoutNd)
        for name, value in list(vars(owner).items()):
            named = "drop" in name or (is_dropout and name == "p")
            if named and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
                yield owner, name, float(value)


@contextmanager
def isolated_rng(seed: int) -> Iterator[None]:
    """Draw from a generator seeded with ``seed`` inside, and leave the global CPU generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
