"""The configuration of a run, changed by new overrides as if they had been given when it began.

The run's recorded values are the base. The configuration is composed twice, with the overrides of the first start and
with the new ones added, and only the difference is applied: so options of groups can be exchanged, interpolated values
follow the keys they refer to, and defaults that the kit has changed since do not enter the run.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from lightning_rlhf.schema import InputError, flatten, get
from lightning_rlhf.schema.searchpath import register
from lightning_rlhf.schema.spelling import hint
from lightning_rlhf.schema.verl import adopt

OF_ONE_START = ("resume", "branch", "resume_on_other_data", "output_dir")
"""Keys that concern one command only; later starts do not inherit them."""


@dataclass(frozen=True)
class Composition:
    """The inputs that a configuration was composed from.

    Attributes:
        overrides: as given, in their order, without those of Hydra itself.
        config_dir: the folder given by ``--config-dir``, absolute.
        config_name: the primary file.
    """

    overrides: tuple[str, ...] = ()
    config_dir: str | None = None
    config_name: str = "train"

    @classmethod
    def of_command(cls, words: Sequence[str]) -> Composition:
        """From the arguments of ``lightning-rlhf train``."""
        options = {
            "-cd": "config_dir",
            "--config-dir": "config_dir",
            "-cn": "config_name",
            "--config-name": "config_name",
        }
        found: dict[str, str] = {}
        overrides = []
        waiting: str | None = None
        for word in words:
            flag, equals, value = word.partition("=")
            if waiting:
                found[waiting], waiting = word, None
            elif flag in options:
                waiting = None if equals else options[flag]
                found |= {options[flag]: value} if equals else {}
            elif not word.startswith("-") and (equals or word.startswith("~")):
                overrides.append(word)
        if "config_dir" in found:
            found["config_dir"] = str(Path(found["config_dir"]).absolute())
        typed = tuple(word for word in overrides if not re.match(r"[+~]*hydra[./]", word))
        return cls(typed, **found)

    def of_job(self) -> Composition:
        """With the overrides of Hydra's current job, which contain the values of the sweep."""
        if HydraConfig.instance().cfg is None:
            return self
        return replace(self, overrides=tuple(HydraConfig.get().overrides.task))

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Composition:
        """From the result of :meth:`plain`."""
        return cls(tuple(record["overrides"]), record.get("config_dir"), record.get("config_name", "train"))

    def plain(self) -> dict[str, Any]:
        """For a JSON file."""
        return asdict(self) | {"overrides": list(self.overrides)}

    def followed_by(self, new: Composition) -> Composition:
        """This composition with new overrides added; of two for one key the new one stays, with the old one's ``+``."""
        words = merged(self.overrides, new.overrides)
        other = {"config_name": new.config_name} if new.config_name != "train" else {}
        return replace(self, overrides=tuple(words), config_dir=new.config_dir or self.config_dir, **other)

    def of_the_run(self) -> Composition:
        """Without the overrides that concern one start only."""
        return replace(self, overrides=tuple(w for w in self.overrides if _key(w) not in OF_ONE_START))


def value_of(words: Sequence[str], key: str) -> Any:
    """The value that overrides give a key, ``None`` without one."""
    given = [word for word in words if _key(word) == key and "=" in word]
    return parse(given)[-1].value() if given else None


def parse(words: Sequence[str]) -> list[Override]:
    """Overrides as Hydra reads them.

    Raises:
        OverrideParseException: one of them cannot be read.
    """
    return OverridesParser.create().parse_overrides(overrides=list(words))


def merged(recorded: Sequence[str], new: Sequence[str]) -> list[str]:
    """The recorded overrides followed by the new ones, each key once."""
    kept = {_place(override): override for override in parse(recorded)}
    for override in parse(new):
        before = kept.pop(_place(override), None)
        added = before is not None and before.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
        if added and override.type is OverrideType.DEL:
            continue
        if added and override.type is OverrideType.CHANGE:
            override = parse([f"+{override.input_line}"])[0]
        kept[_place(override)] = override
    # The key of a value, unlike that of a group's option, has a dot; adding the value twice must not be an error.
    force = {OverrideType.ADD: "+"}
    return [(force.get(o.type, "") if "." in o.key_or_group else "") + str(o.input_line) for o in kept.values()]


def _place(override: Override) -> tuple[str, str | None]:
    return override.key_or_group, override.package


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


# --- composing -------------------------------------------------------------------------------------------------------


def compose(composition: Composition, output_dir: str, like: DictConfig | None = None) -> DictConfig:
    """The configuration, with interpolations; those of Hydra (``${hydra:...}``, ``${now:...}``) can be resolved in it.

    Args:
        composition: what to compose.
        output_dir: value of ``${hydra:runtime.output_dir}``.
        like: an earlier result, whose value of ``${now:...}`` is used again.
    """
    with _hydra(composition) as hydra:
        config = hydra.compose_config(
            composition.config_name,
            overrides=list(composition.overrides),
            run_mode=RunMode.RUN,
            from_shell=True,
            with_log_configuration=False,
        )
    with read_write(config.hydra), open_dict(config.hydra):
        config.hydra.runtime.output_dir = output_dir
        config.hydra.job.num, config.hydra.job.id = 0, "0"
    if like is not None:
        OmegaConf.copy_cache(like, config)
    return config


def resolved(config: DictConfig) -> dict[str, Any]:
    """A result of :func:`compose` in plain containers, without the block ``hydra``."""
    instance = HydraConfig.instance()
    before = instance.cfg
    instance.set_config(config)
    try:
        plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    finally:
        instance.cfg = before
    return {name: value for name, value in plain.items() if name != "hydra"}


@contextmanager
def _hydra(composition: Composition) -> Iterator[Hydra]:
    """A separate Hydra instance; one that is already running is restored afterwards."""
    register()
    instance = GlobalHydra.instance()
    before, instance.hydra = instance.hydra, None
    try:
        path = create_automatic_config_search_path(None, None, "pkg://lightning_rlhf.conf")
        if composition.config_dir is not None:
            if not Path(composition.config_dir).is_dir():
                raise InputError(f"the run was composed with --config-dir {composition.config_dir}, which is not there")
            path.prepend("command-line", f"file://{composition.config_dir}", SearchPathQuery(provider="schema"))
        yield Hydra.create_main_hydra2(task_name="train", config_search_path=path)
    finally:
        instance.hydra = before


# --- the difference --------------------------------------------------------------------------------------------------


def recomposed(saved: Mapping[str, Any], own: Composition, new: Composition) -> tuple[dict[str, Any], Composition]:
    """The configuration of a run with new overrides.

    Args:
        saved: the run's recorded values, resolved.
        own: the composition they come from, as far as it is known.
        new: the overrides of this start.

    Returns:
        The configuration, and its composition, without recorded overrides of keys that the new options do not have.

    Raises:
        InputError: a key that neither the configuration files nor the run has.
        HydraException: an unknown option, or an override that cannot be parsed.
    """
    own, new = own.of_the_run(), new.of_the_run()
    folder = str(saved.get("output_dir"))
    if not new.overrides:
        return copy.deepcopy(dict(saved)), own
    own, before = _composed(own, folder)
    direct: list[str] = []
    while True:
        both = own.followed_by(replace(new, overrides=tuple(w for w in new.overrides if w not in direct)))
        try:
            after = compose(both, folder, like=before)
            break
        except ConfigCompositionException as error:
            key = _key_in(error)
            recorded = [word for word in own.overrides if _key(word) == key]
            typed = [word for word in new.overrides if _key(word) == key and word not in direct]
            if typed and get(saved, key, default=...) is not ...:
                direct += typed  # overrides of a block that the recorded composition does not have
            elif recorded and not typed:
                own = replace(own, overrides=tuple(word for word in own.overrides if word not in recorded))
            elif typed:
                near = hint(key, [name for name, _ in flatten(saved)])
                raise InputError(f"the run has no key {key!r}" + (f"; {near}" if near else "")) from error
            else:
                raise
    groups = after.hydra.runtime.choices
    values = [o.key_or_group for o in parse(new.overrides) if o.key_or_group not in groups]
    config = apply_difference(saved, resolved(before), resolved(after), values)
    config = adopt(with_values(config, direct))[0]  # an override of a pasted veRL block changes our key
    return config, replace(both, overrides=(*both.overrides, *direct))


def _composed(own: Composition, folder: str) -> tuple[Composition, DictConfig]:
    """A run's composition, without recorded overrides that changed its values directly, and what it gives.

    The values of such overrides are in the run's recorded configuration.
    """
    while True:
        try:
            return own, compose(own, folder)
        except ConfigCompositionException as error:
            key = _key_in(error)
            kept = tuple(word for word in own.overrides if not key or _key(word) != key)
            if len(kept) == len(own.overrides):
                raise
            own = replace(own, overrides=kept)


def apply_difference(
    saved: Mapping[str, Any], before: Mapping[str, Any], after: Mapping[str, Any], named: Sequence[str] = ()
) -> dict[str, Any]:
    """``saved`` with every leaf changed that differs between ``before`` and ``after``, or that is at a named key.

    A block whose class changes is replaced by the new block: arguments that only the saved block had belong to its
    old class.
    """
    config = copy.deepcopy(dict(saved))
    old, new, kept = dict(flatten(before)), dict(flatten(after)), dict(flatten(saved))
    for key in old.keys() - new.keys():
        _delete(config, key)
    classes = [key for key in new if key.endswith("._target_") and new[key] != old.get(key)]
    exchanged = [key.removesuffix("_target_") for key in classes if kept.get(key, new[key]) != new[key]]
    for key in kept.keys() - new.keys():
        if any(key.startswith(block) for block in exchanged):
            _delete(config, key)
    for key, value in new.items():
        is_named = any(key == name or key.startswith(f"{name}.") for name in named)
        is_named = is_named or any(key.startswith(block) for block in exchanged)
        if is_named or key not in old or type(old[key]) is not type(value) or old[key] != value:
            _put(config, key, copy.deepcopy(value))
    return config


def with_values(config: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration with single values set, without composing.

    Raises:
        InputError: a key that the configuration does not have.
    """
    node = OmegaConf.create(dict(config))
    OmegaConf.set_struct(node, True)
    for override in parse(overrides):
        try:
            OmegaConf.update(node, override.key_or_group, override.value(), merge=False)
        except OmegaConfBaseException as error:
            near = hint(override.key_or_group, [name for name, _ in flatten(config)])
            text = f"the run has no key {override.key_or_group!r}" + (f"; {near}" if near else "")
            raise InputError(text) from error
    return OmegaConf.to_container(node)  # type: ignore[return-value]


def _key_in(error: Exception) -> str:
    text = str(error)
    found = re.search(r"(?:Could not override|already at|Could not delete from config\.) '([^']+)'", text)
    found = found or re.search(r"Error merging override \+*([^=]+)=", text)
    return found[1] if found else ""


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    *blocks, last = key.split(".")
    node = config
    for name in blocks:
        if not isinstance(node.get(name), dict):
            node[name] = {}
        node = node[name]
    node[last] = value


def _delete(config: dict[str, Any], key: str) -> None:
    *blocks, last = key.split(".")
    way = [config]
    for name in blocks:
        if not isinstance(way[-1].get(name), dict):
            return
        way.append(way[-1][name])
    way[-1].pop(last, None)
    for node, name in reversed(list(zip(way, blocks, strict=False))):
        if not node[name]:  # a block whose last key was deleted
            del node[name]
