"""The words of ``lightning-rlhf train`` before Hydra reads them; needs no heavy import."""

from __future__ import annotations

import re
from difflib import get_close_matches

from lightning_rlhf import passwords
from lightning_rlhf.errors import InputError
from lightning_rlhf.schema.shipped import groups


def flags_first(arguments: list[str]) -> list[str]:
    """Hydra's parser reads no overrides after a flag that follows one; the order is kept otherwise."""
    flags = [word for word in arguments if word.startswith("-") or not ("=" in word or word.startswith("~"))]
    return [*flags, *(word for word in arguments if word not in flags)]


FLAGS = {
    "--cfg": 1, "-c": 1, "--package": 1, "-p": 1, "--config-path": 1, "-cp": 1, "--config-name": 1, "-cn": 1,
    "--config-dir": 1, "-cd": 1, "--experimental-rerun": 1, "--info": 1, "-i": 1,
    "--resolve": 0, "--run": 0, "-r": 0, "--multirun": 0, "-m": 0, "--hydra-help": 0, "--version": 0,
    "--shell-completion": 0, "-sc": 0,
}  # fmt: skip
"""Hydra's flags, and how many values each takes."""


def refuse_words(arguments: list[str]) -> None:
    """Refuse settings in other programs' style (``--lr 3``, ``--lr=3``, ``lr``), groups set to null, and passwords."""
    before = ""
    for word in arguments:
        flag = word.partition("=")[0]
        if passwords.is_in_word(word):  # before Hydra saves the command line
            raise InputError(f"{passwords.hidden_word(word)} is not allowed: {passwords.refused(flag)}")
        if word.startswith("-") and flag not in FLAGS:
            from lightning_rlhf.schema.shipped import shipped_keys
            from lightning_rlhf.schema.spelling import hint

            key, keys = flag.lstrip("-").replace("-", "_"), shipped_keys()
            flags = get_close_matches(flag, [name for name in FLAGS if name.startswith("--")], n=1, cutoff=0.75)
            near = f"did you mean {(flags or [key])[0]}?" if flags or key in keys else hint(key, keys)
            raise InputError(
                f"{word} is no flag{'; ' if near else ''}{near}\n"
                "Settings are written key=value without dashes, as in iterations=100. "
                "Flags: --cfg job, --info, --multirun, --config-dir FOLDER, --hydra-help"
            )
        if not word.startswith(("-", "~")) and "=" not in word and not FLAGS.get(before):
            raise InputError(f"{word!r} is not allowed: settings are written key=value, without blanks")
        before = word
        group, _, option = word.partition("=")
        if word.startswith("="):
            raise InputError(f"{word!r} is not allowed: settings are written key=value")
        if re.fullmatch(r"-?[\d.]+|true|false", option) and group in groups():  # Hydra takes names only
            raise InputError(f"there is no {word}; options of {group}: {', '.join(groups()[group])}")
        if group in ("~model", "~data"):  # other groups follow these two
            name = group[1:]
            raise InputError(f"{word} is not allowed: {name} is a group of files; one of {', '.join(groups()[name])}")
        if group == "resume" and not option.strip(" \t'\""):
            raise InputError(f"{word} is not allowed: the folder of a run, a checkpoint, latest, or null")
        if option == "null" and group in groups():
            off = f"{group}=none" if "none" in groups()[group] else f"one of {', '.join(groups()[group])}"
            raise InputError(f"{word} is not allowed: {group} is a group of files; {off}")
