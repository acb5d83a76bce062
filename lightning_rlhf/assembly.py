"""From a checked configuration to the objects of a run; every failure here names the block that asked for it."""

from __future__ import annotations

import inspect
import logging
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from lightning import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from transformers import PreTrainedTokenizerBase

from lightning_rlhf.accelerators.npu import trainer_objects
from lightning_rlhf.checkpoint import CheckpointError, RNGState, latest_valid, verify, warn_about_model_checkpoint
from lightning_rlhf.checkpoint.files import STATE, is_sharded
from lightning_rlhf.checkpoint.shards import read_checkpoint
from lightning_rlhf.data import PromptDataModule, check_room
from lightning_rlhf.data.groups import GroupNames
from lightning_rlhf.distributed import first_fault
from lightning_rlhf.files import spelt_out
from lightning_rlhf.metrics.groups import PromptGroups
from lightning_rlhf.models import LoadedModel, load_pretrained, load_tokenizer
from lightning_rlhf.module import ActorCriticModule
from lightning_rlhf.quiet import quiet_loading
from lightning_rlhf.reporting import blocks_of
from lightning_rlhf.reporting.progress import ProgressLines
from lightning_rlhf.rollout import BaseEngine, RolloutEngine
from lightning_rlhf.rollout.binding import bind
from lightning_rlhf.runs.folder import kept_elsewhere, refuse_another_runs
from lightning_rlhf.schema import NOT_HANDED_OVER, InputError, get
from lightning_rlhf.schema.batch_sizes import settings_of
from lightning_rlhf.schema.locate import locate
from lightning_rlhf.screening import reply_tokens
from lightning_rlhf.seeds import RankSeeds
from lightning_rlhf.supervise.heartbeat import heartbeat
from lightning_rlhf.warmup import WarmUp
from lightning_rlhf.warmup import warm_up as supervised

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """The model, data module and LightningModule of a run."""

    loaded: LoadedModel
    datamodule: PromptDataModule
    module: ActorCriticModule


def assemble(
    config: dict[str, Any], *, warm_up: bool = True, earlier_warm_up: Mapping[str, Any] | None = None
) -> Parts:
    """Build tokenizer, data, rollout engine, reward, model and module, in this order, from a fixed seed.

    Errors in data, reward and lengths are reported before the model's weights are loaded.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.
        warm_up: run the configured supervised warm-up; not needed where a checkpoint's weights are loaded.
        earlier_warm_up: what the checkpoint of a run that is resumed says of the warm-up at its start.

    Raises:
        InputError: a block cannot be built as configured.
    """
    if config["threads"] is not None:
        torch.set_num_threads(config["threads"])
    quiet_loading()
    seed_everything(config["seed"], verbose=False)
    iterations, seed = config["iterations"], config["seed"]
    with building("model.source"):
        source, tokenizer = open_source(config["model"]["source"])
    with building("data"):
        datamodule = make(config["data"], tokenizer=tokenizer, iterations=iterations, seed=seed)
        datamodule.setup("fit")
    with building("module"):
        check_groups(config, datamodule)
    with building("rollout"):
        engine = make(config["rollout"])
        check_members(engine)
    with building("data"):
        check_lengths(config, datamodule, engine)
    with building("module"):  # the module asks again, but only after the warm-up
        reply_tokens(get(config, "module.safety"), tokenizer, engine.sampling.max_new_tokens)
    with building("reward"):
        reward = make(_functions_as_objects(config["reward"]))
        reward.check_rows(prompt.row for prompt in [*datamodule.train_prompts, *datamodule.validation_prompts])
    with building("model.source"):
        loaded = source()
    with building("data"):
        check_positions(datamodule, engine, loaded)
    with building("rollout"):
        check_stop_tokens(engine, loaded)
    warmed: Any = None
    if config.get("warmup") and warm_up:
        with building("warmup"):
            own = locate(config["warmup"]["_target_"]) is supervised
            earlier = {"earlier": earlier_warm_up} if own and earlier_warm_up else {}
            warmed = make(config["warmup"], loaded=loaded, datamodule=datamodule, seed=seed, **earlier)
    with building("model.policy"):
        policy = make(config["model"]["policy"], loaded=loaded)
    with building("module"):
        objects = {"policy": policy, "engine": engine, "reward": reward, "iterations": iterations, "seed": seed}
        module = make(config["module"], **objects)
    module.run_config = config
    if isinstance(warmed, WarmUp):
        module.warm_up = {**warmed.record, "lr": config["warmup"]["lr"]}
    return Parts(loaded, datamodule, module)


def open_source(block: Mapping[str, Any]) -> tuple[Callable[[], LoadedModel], PreTrainedTokenizerBase]:
    """A function that loads the model, and the tokenizer (of a pre-trained model without loading its weights)."""
    if locate(block["_target_"]) is load_pretrained:
        tokenizer = load_tokenizer(**{name: value for name, value in block.items() if name != "_target_"})

        def load() -> LoadedModel:
            log.info("loading the weights of %s", block["path"])
            return make(block, tokenizer=tokenizer)

        return load, tokenizer
    loaded = make(block)
    return lambda: loaded, loaded.tokenizer


def check_groups(config: Mapping[str, Any], datamodule: PromptDataModule) -> None:
    """Refuse weights of groups that the training prompts do not have."""
    settings, names = settings_of(config), getattr(datamodule, "groups", None)
    if settings is not None and isinstance(names, GroupNames):
        PromptGroups(settings).take(names.train, names.labels)


def check_members(engine: Any) -> None:
    """Refuse an engine that lacks what is asked of every engine."""
    members = [*RolloutEngine.__annotations__, *(name for name in vars(RolloutEngine) if not name.startswith("_"))]
    missing = [name for name in members if name not in dir(engine)]
    if missing:
        raise ValueError(
            f"{type(engine).__name__} lacks {', '.join(missing)}; a subclass of lightning_rlhf.rollout.BaseEngine has "
            "all but setup, generate, update_weights, describe and close"
        )


def check_lengths(config: Mapping[str, Any], datamodule: PromptDataModule, engine: Any) -> None:
    """Refuse prompts too long for the engine's context or the token budgets; needs no model."""
    response = engine.sampling.max_new_tokens
    if (longest := engine.max_model_len) is not None:
        check_room(datamodule, response, longest, "rollout.max_model_len")
    update = config["module"].get("update") or {}
    for name in ("micro_batch_tokens", "score_tokens"):
        if name in update:
            check_room(datamodule, response, update[name], f"module.update.{name}")


def check_positions(datamodule: PromptDataModule, engine: Any, loaded: LoadedModel) -> None:
    """Refuse prompts that leave no room for a response within the model's positions."""
    positions = getattr(loaded.lm.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None:
        check_room(datamodule, engine.sampling.max_new_tokens, positions, "the positions of the model")


def check_stop_tokens(engine: Any, loaded: LoadedModel) -> None:
    """Refuse stop tokens outside the vocabulary, as the engine does, which is set up only after the warm-up."""
    if isinstance(engine, BaseEngine):
        bind(loaded.lm, loaded.tokenizer, engine.stop_token_ids)


def make_trainer(config: Mapping[str, Any], *, train: bool = True) -> Trainer:
    """The Trainer with its logger and callbacks.

    Args:
        config: plain containers, as :func:`lightning_rlhf.schema.check` returns them.
        train: with the configured callbacks and logger; without them for an evaluation.
    """
    callbacks: list[Callback] = []
    loggers: list[Logger] = []
    if train:
        # Always there: without the second a resumed run would not continue bit for bit.
        callbacks += [RankSeeds(), RNGState(), *heartbeat()]
        for name, block in (config["callbacks"] or {}).items():
            if block is not None:
                with building(f"callbacks.{name}"):
                    callbacks.append(_one(Callback, make(block)))
        for name, block in blocks_of(config.get("logger")).items():
            with building(f"logger.{name}"):
                loggers.append(_one(Logger, make(block)))
    warn_about_model_checkpoint(callbacks)
    settings: dict[str, Any] = {
        name: value for name, value in config["trainer"].items() if name not in NOT_HANDED_OVER["trainer"]
    }
    if not train:
        settings |= {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    own_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if train and not own_bar:
        terminal = settings.get("enable_progress_bar", True)
        callbacks.append(ProgressLines(config["iterations"], config["progress_every"], terminal=terminal))
    # Lightning's own bar shows one epoch, not iterations.
    settings["enable_progress_bar"] = train
    with building("trainer"):
        trainer: Trainer = make(
            settings,
            **trainer_objects(settings),
            callbacks=callbacks,
            logger=loggers or False,
            default_root_dir=config["output_dir"],
            # The run's length is `iterations`, the number of batches that the data module hands out.
            max_epochs=1,
            val_check_interval=config["evaluate_every"] or config["iterations"] + 1,
            check_val_every_n_epoch=None,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            use_distributed_sampler=False,
            enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        )
    first_fault.watch(trainer, config["trainer"])
    return trainer


def _one(kind: type, built: Any) -> Any:
    """What a block has built, if it is of the kind that Lightning takes there."""
    if not isinstance(built, kind):
        raise ValueError(f"{type(built).__module__}.{type(built).__name__} is no {kind.__module__}.{kind.__name__}")
    return built


def find_checkpoint(where: str, key: str = "checkpoint") -> Path:
    """The checkpoint that ``where`` names: itself, a folder of checkpoints, or a run's folder.

    Args:
        where: the value of a key.
        key: its name, for errors.

    Raises:
        InputError: there is no whole checkpoint, or the file named is damaged.
    """
    path = spelt_out(where)
    if path.is_file() or is_sharded(path):
        try:
            verify(path)
        except CheckpointError as error:
            raise InputError(f"{key} = {where!r} is damaged or is none: {error}") from error
        return path
    found = newest_checkpoint(path) or latest_valid(path)
    if found is None:
        what = "holds no whole checkpoint: a run that ended before its first one has to be started anew"
        what = what if path.is_dir() else "does not exist"
        raise InputError(f"{key} = {where!r} {what}; allowed: a .ckpt or the output folder of a run")
    return found


def newest_checkpoint(run: str | Path) -> Path | None:
    """The newest whole checkpoint of the run in this folder; the run may keep its checkpoints in another one.

    Raises:
        InputError: another run has written the newest one in that other folder.
    """
    elsewhere = kept_elsewhere(run)
    found = latest_valid(elsewhere) if elsewhere else None
    if found is None:
        return latest_valid(Path(run) / "checkpoints")
    file = found / STATE if found.is_dir() else found
    content = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    settings = content.get("lightning_rlhf", {}).get("run_config") or {}
    refuse_another_runs(run, found, settings.get("output_dir", run))
    return found


def load_checkpoint(where: str) -> tuple[Path, dict[str, Any]]:
    """Path and content of the checkpoint that ``where`` names, see :func:`find_checkpoint`.

    Raises:
        InputError: there is none, it is damaged, or it was not written by a run of this package.
    """
    path = find_checkpoint(where)
    try:
        content = read_checkpoint(path)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise InputError(f"checkpoint = {str(path)!r} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or not content.get("lightning_rlhf", {}).get("run_config"):
        raise InputError(f"checkpoint = {str(path)!r} holds no configuration: `lightning-rlhf train` did not write it")
    return path, content


def make(node: Mapping[str, Any], **objects: Any) -> Any:
    """Instantiate a ``_target_`` block; ``objects`` are handed over as they are, never copied into a config."""
    return instantiate(dict(node), _partial_=True, _convert_="all")(**objects)


@contextmanager
def building(block: str) -> Iterator[None]:
    """Turn any exception of a constructor into one message that names its block of the configuration."""
    try:
        yield
    except Exception as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) and error.__cause__ else error
        expected = isinstance(cause, (ValueError, OSError, ImportError))
        text = str(cause) if expected else f"{type(cause).__name__}: {cause}"
        raise InputError(with_key(text, block)) from error


def with_key(text: str, block: str) -> str:
    """Put the configuration key in front of a constructor's message, unless it is there already."""
    if re.match(rf"{re.escape(block)}[.:\s]", f"{text} "):
        return text
    argument = re.match(r"model (\w+ = .*)", text, re.DOTALL)  # the parts of a model do not know their block
    return f"{block}.{argument[1]}" if argument else f"{block}: {text}"


def _functions_as_objects(node: Any) -> Any:
    """Mark reward blocks whose ``_target_`` is a plain function: it is the reward itself, Hydra must not call it."""
    if isinstance(node, list):
        return [_functions_as_objects(item) for item in node]
    if not isinstance(node, Mapping):
        return node
    block = {name: _functions_as_objects(value) for name, value in node.items()}
    if "_target_" in block and inspect.isfunction(locate(block["_target_"])):
        block.setdefault("_partial_", True)
    return block
