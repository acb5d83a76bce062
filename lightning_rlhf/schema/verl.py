"""A block of rollout correction pasted from veRL, in any of the three versions (eras) of its keys.

========  ==============================  =========================================================================
era       where                           keys
========  ==============================  =========================================================================
1         flat, under ``algorithm``       ``rollout_is`` (a boolean), ``rollout_is_level``, ``rollout_is_mode``,
                                          ``rollout_is_threshold``, ``rollout_is_threshold_lower``,
                                          ``rollout_is_veto_threshold``: **refused**, with the keys to write instead
2         ``rollout_correction``          ``rollout_is``, ``rollout_rs`` (token, sequence, geometric),
                                          ``rollout_rs_threshold``, ``rollout_rs_threshold_lower``,
                                          ``rollout_token_veto_threshold``: our own keys
3 (2026)  ``rollout_correction``          ``rollout_rs`` a list of ``token_k1 ... seq_max_k3`` with bounds such as
                                          ``"0.5_2.0"``: accepted unchanged. ``token_k1`` is our ``token``,
                                          ``seq_sum_k1`` our ``sequence``, ``seq_mean_k1`` our ``geometric``
========  ==============================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_rlhf.errors import SettingError

PASTED = "algorithm.rollout_correction"
OURS = "module.rollout_correction"
LOGPROBS = "actor_rollout_ref.rollout.calculate_log_probs"

FIRST_ERA = {
    "rollout_is_level": "rollout_is",
    "rollout_is_mode": "rollout_is_mode",
    "rollout_is_threshold": "rollout_is_threshold",
    "rollout_is_threshold_lower": "rollout_is_threshold_lower",
    "rollout_is_veto_threshold": "rollout_token_veto_threshold",
}
"""Keys of the first era that have a counterpart here, and its name."""

RENAMED = {"bypass_old_logprob_for_rollout": "bypass_mode"}
"""Early names of keys of the second era."""

POLICY_GRADIENT = ("use_policy_gradient", "use_pure_rollout_correction")
"""Early booleans of the second era that mean today's ``loss_type: reinforce``."""


def adopt(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Move a pasted ``algorithm.rollout_correction`` to ``module.rollout_correction``, overriding the values there.

    Args:
        config: plain containers.

    Returns:
        The configuration without the pasted keys, and a note for the user about each change.

    Raises:
        SettingError: keys of the first era, a value that is not a block, or log-probabilities switched off.
    """
    moved = {name: value for name, value in config.items()}
    notes: list[str] = []
    algorithm = config.get("algorithm")
    if isinstance(algorithm, Mapping):
        _refuse_first_era(algorithm)
        if "rollout_correction" in algorithm:
            block = translate(algorithm["rollout_correction"])
            module = dict(config.get("module") or {})
            module["rollout_correction"] = {**(module.get("rollout_correction") or {}), **block}
            moved["module"] = module
            shown = ", ".join(f"{name}={'null' if value is None else value}" for name, value in block.items())
            notes.append(f"veRL's {PASTED} is taken over as {OURS}: {shown}")
            moved["algorithm"] = {k: v for k, v in algorithm.items() if k != "rollout_correction"}
        if not moved["algorithm"]:
            del moved["algorithm"]
    _log_probs(moved, notes)
    return moved, notes


def pasted_name(key: str, config: Mapping[str, Any]) -> str:
    """The name under which a key of our block is overridden while a block is pasted.

    Returns:
        The key of the pasted block that sets it; with a plus sign, as Hydra adds keys, where neither the pasted block
        nor ours has it; ``key`` itself otherwise.
    """
    algorithm = config.get("algorithm")
    block = algorithm.get("rollout_correction") if isinstance(algorithm, Mapping) else None
    parent, _, name = key.rpartition(".")
    if parent != OURS or not isinstance(block, Mapping):
        return key
    own = (config.get("module") or {}).get("rollout_correction")
    found = next((str(theirs) for theirs in block if RENAMED.get(str(theirs), str(theirs)) == name), None)
    if found is None and name not in (own or {}):
        return f"+{PASTED}.{name}"
    return f"{PASTED}.{found}" if found else key


def outvoted(typed: Sequence[str], config: Mapping[str, Any]) -> Iterator[SettingError]:
    """Overrides of our block that a pasted block would silently set to something else.

    Args:
        typed: the overrides of the command line.
        config: plain containers, with the pasted block still in place.
    """
    for word in typed:
        key, _, value = word.lstrip("+").partition("=")
        theirs = pasted_name(key, config)
        if theirs != key and not theirs.startswith("+"):
            allowed = f"the block pasted as {PASTED} sets this, too, and would decide; write {theirs}={value}"
            yield SettingError(key, value, allowed)


def translate(block: Any) -> dict[str, Any]:
    """Translate a block of the second or third era into our keys.

    Raises:
        SettingError: it is not a block, or is one of the first era.
    """
    if not isinstance(block, Mapping):
        raise SettingError(PASTED, block, "a block of keys, or leave it out")
    _refuse_first_era(block, PASTED)
    ours: dict[str, Any] = {}
    for name, value in block.items():
        if name in POLICY_GRADIENT:
            if value:
                ours["loss_type"] = "reinforce"
        elif name in ("rollout_rs", "rollout_rs_threshold") and isinstance(value, (list, tuple)):
            ours[name] = ",".join(str(item) for item in value)
        else:
            ours[RENAMED.get(str(name), str(name))] = value
    return ours


def _refuse_first_era(block: Mapping[str, Any], place: str = "algorithm") -> None:
    """Refuse keys of the first era, whose meaning is ambiguous today, and print the equivalent overrides."""
    old = {name for name in ("rollout_is_level", "rollout_is_veto_threshold") if name in block}
    if isinstance(block.get("rollout_is"), bool):
        old.add("rollout_is")
    if place == "algorithm":
        old |= {name for name in (*FIRST_ERA, "rollout_is") if name in block}
    if not old:
        return
    lines = [f"{OURS}.{new}={block[name]}" for name, new in FIRST_ERA.items() if block.get(name) is not None]
    if block.get("rollout_is") is False:
        lines = ["rollout_correction=monitor, for weights were computed and not applied"]
    elif block.get("rollout_is") is True and "rollout_is_level" not in block:
        lines.append(f"{OURS}.rollout_is=token")
    first = next(name for name in block if name in old)
    raise SettingError(
        f"{place}.{first}",
        block[first],
        "a key of veRL's first version of rollout correction; write, with rollout_correction=monitor: "
        + " ".join(lines),
    )


def _log_probs(config: dict[str, Any], notes: list[str]) -> None:
    """Remove ``calculate_log_probs: true``, which veRL's block requires and which is always on here."""
    rest = config.get("actor_rollout_ref")
    if not isinstance(rest, Mapping):
        return
    rollout = rest.get("rollout")
    if not isinstance(rollout, Mapping) or "calculate_log_probs" not in rollout:
        return
    if rollout["calculate_log_probs"] is not True:
        raise SettingError(LOGPROBS, rollout["calculate_log_probs"], "true, or leave it out: engines here always do")
    notes.append(f"{LOGPROBS}=true is left out: engines here always report log-probabilities")
    rollout = {k: v for k, v in rollout.items() if k != "calculate_log_probs"}
    rest = {k: v for k, v in rest.items() if k != "rollout"} | ({"rollout": rollout} if rollout else {})
    if rest:
        config["actor_rollout_ref"] = rest
    else:
        del config["actor_rollout_ref"]
