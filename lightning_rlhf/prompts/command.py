"""The command: the suspects of a run, one prompt's history, lists and a page for their review, map and ranking."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.errors import InputError
from lightning_rlhf.files import as_file
from lightning_rlhf.reporting.prompt_records import FOLDER, SUSPECTS, DamagedPieces, read_records
from lightning_rlhf.reporting.prompt_review import (
    aligned,
    described,
    fault_of,
    in_present_names,
    shortened,
    write_review,
)
from lightning_rlhf.reporting.prompt_table import refuse_without_records
from lightning_rlhf.runs.folder import STARTS

SHOWN = 5
"""Responses that ``--why`` prints."""
SWITCH_ON = "callbacks=[default,prompt_monitor,prompt_records]"


FLAGS = {
    "--why": ("KEY", "a prompt key"),
    "--export": ("FOLDER", "a folder"),
    "--map": ("FOLDER", "a folder"),
    "--screen": ("FILE", "a file of new prompts"),
    "--threshold": ("P", "a number between 0 and 1"),
    "--embedding": ("NAME", "an import path, or a block with _target_"),
}
"""Flags, what stands for each one's value in the help, and what the value is."""


@dataclass(frozen=True)
class Options:
    """What the command asks for.

    Attributes:
        run: folder of a run, or ``latest``.
        why: a prompt key whose history is shown.
        export: folder for the lists and the page; with ``screen`` for the ranking of the new prompts and its list.
        map: folder for a map of the prompts.
        screen: file of new prompts that are ranked.
        threshold: probability from which on a new prompt is listed.
        embedding: what makes vectors of texts in place of the policy.
    """

    run: str
    why: str | None = None
    export: str | None = None
    map: str | None = None
    screen: str | None = None
    threshold: str | None = None
    embedding: str | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Options:
        """From the arguments after the verb.

        Raises:
            InputError: no run, several, an unknown flag, a flag without its value, or one that has no effect.
        """
        runs: list[str] = []
        flags: dict[str, str] = {}
        words = iter(arguments)
        for word in words:
            name, equals, value = word.partition("=")
            if name in FLAGS:
                value = value if equals else next(words, "")
                if not value or value.startswith("--"):
                    raise InputError(f"{name} needs a value: {FLAGS[name][1]}")
                flags[name[2:]] = value
            elif word.startswith("-"):
                known = ", ".join(f"{flag} {value}" for flag, (value, _) in FLAGS.items())
                raise InputError(f"{word} is no flag of prompts; there are {known}")
            else:
                runs.append(word)
        if len(runs) != 1:
            found = "none" if not runs else ", ".join(runs)
            raise InputError(f"prompts needs the folder of one run, or latest; given: {found}")
        if "threshold" in flags and "screen" not in flags:
            raise InputError("--threshold has no effect without --screen FILE")
        if "embedding" in flags and not {"screen", "map"} & {*flags}:
            raise InputError("--embedding has no effect without --map FOLDER or --screen FILE")
        return cls(runs[0], **flags)

    @property
    def least(self) -> float:
        """The threshold as a number; 0.5 by default.

        Raises:
            InputError: it is none between 0 and 1.
        """
        try:
            value = 0.5 if self.threshold is None else float(self.threshold)
        except ValueError:
            value = math.nan
        if not 0 < value < 1:
            raise InputError(f"--threshold {self.threshold} is not allowed: a number > 0 and < 1")
        return value


def show(options: Options) -> None:
    """Print what is asked for, and write map, ranking or export.

    Raises:
        InputError: no such run, nothing recorded, an unknown key, a folder in use, or what
            :func:`~lightning_rlhf.prompts.study.study` refuses.
    """
    least = options.least
    run = find_run(options.run)
    damaged = DamagedPieces(lambda text: print(f"warning: {text}", file=sys.stderr))
    if options.why is not None:
        print(history(run, options.why, damaged))
    if options.map is not None or options.screen is not None:
        from lightning_rlhf.prompts.study import Wishes, study  # loads what makes models

        wishes = Wishes(options.map, options.screen, options.export, least, options.embedding)
        study(run, wishes, suspects_of(run), damaged)
    if options.export is not None and options.screen is None:
        found = read_suspects(run)
        records = records_of(run, [suspect["key"] for suspect in found["suspects"]], damaged)
        if not records and found["suspects"]:
            print(f"note: {run / FOLDER} has no records, so texts and responses are missing; next time {SWITCH_ON}")
        print("\n".join(write_review(Path(options.export).expanduser(), str(run), found, records)))
    if options == Options(options.run):
        print(listing(run, damaged))


def suspects_of(run: Path) -> dict[str, str]:
    """Keys of the suspects, each with its reasons; none where no prompt monitor has written a file."""
    if not (run / FOLDER / SUSPECTS).exists():
        return {}
    return {suspect["key"]: described(suspect) for suspect in read_suspects(run)["suspects"]}


def find_run(where: str) -> Path:
    """The folder that ``where`` names; ``latest`` is the run below ``outputs`` with records that was started last.

    Raises:
        InputError: there is no such run, or nothing is recorded about its prompts.
    """
    if where == "latest":
        every = [path.parent for path in Path("outputs").rglob(STARTS)]
        if not every:
            raise InputError("latest is not allowed: there is no run below outputs/ of the current folder")
        found = [folder for folder in every if (folder / FOLDER).is_dir()] or every  # a refused start records nothing
        run = max(found, key=lambda folder: (folder / STARTS).stat().st_mtime)
    else:
        run = Path(where).expanduser()
    if not run.is_dir():
        what = "is a file" if run.exists() else "does not exist"
        raise InputError(f"{where!r} {what}; allowed: the output folder of a run, or latest")
    if not (run / FOLDER).is_dir():
        raise InputError(f"{run} holds nothing about prompts: the run needs {SWITCH_ON}")
    return run


def read_suspects(run: Path) -> dict[str, Any]:
    """What the prompt monitor wrote.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    path = as_file(run / FOLDER / SUSPECTS)
    if not path.exists():
        raise InputError(
            f"{path} does not exist: the run has no callback prompt_monitor ({SWITCH_ON}), or fewer prompts than "
            "callbacks.prompt_monitor.min_prompts were visited often enough (metric prompts/judged)"
        )
    try:
        found: Any = in_present_names(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if fault := fault_of(found):
        raise InputError(f"{path} is not as callbacks.prompt_monitor writes it: {fault}")
    return found


def records_of(run: Path, keys: Iterable[str], damaged: DamagedPieces) -> dict[str, list[dict[str, Any]]]:
    """The records of some prompts, oldest first, without those in pieces that cannot be read.

    Raises:
        InputError: there are pieces, and none of them can be read.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_records(run, keys=list(keys), damaged=damaged):
        found.setdefault(row["key"], []).append(row)
    damaged.refuse_if_all()
    for rows in found.values():
        rows.sort(key=lambda row: row["iteration"])  # pieces of several ranks follow one another
    return found


def listing(run: Path, damaged: DamagedPieces) -> str:
    """The suspects with reasons and numbers, one line each, the farthest first."""
    found = read_suspects(run)
    suspects, others = found["suspects"], found["others"]
    head = (
        f"{run}, iteration {found['iteration']}: {len(suspects)} of {found['judged']} prompts stand out from the "
        f"others (|z| > {found['z']:g})"
    )
    if not suspects:
        return head
    records = records_of(run, [suspect["key"] for suspect in suspects], damaged)
    shown = ("score", "spread", "kl_excess")
    rows = [["prompt key", "stands out by", *shown, "visits", "since", "prompt"]]
    for suspect in suspects:
        own = records.get(suspect["key"], [])
        numbers = [_digits(suspect[name]) for name in shown]
        text = shortened(own[-1]["prompt"], 40) if own else "(not recorded)"
        rows.append([suspect["key"], described(suspect), *numbers, str(suspect["visits"]), str(suspect["since"]), text])
    rows.append(
        ["median of all", "", *(_digits(others[name]) for name in ("score", "spread", "kl_excess")), "", "", ""]
    )
    more = [
        "score: mean; spread: deviation of the samples; kl_excess: nats per token above the iteration's median prompt;",
        "all over the visits counted here, a prompt's last ones",
        f"one prompt's history:   lightning-rlhf prompts {run} --why KEY",
        f"review, lists to edit:  lightning-rlhf prompts {run} --export FOLDER",
    ]
    return "\n".join([head, "", *aligned(rows), "", *more])


def history(run: Path, key: str, damaged: DamagedPieces) -> str:
    """One prompt: its text, what the monitor says, a line per iteration, and its newest responses.

    The numbers of an iteration are of the policy's own samples; what a safety filter replaced or left out is counted
    beside them.

    Raises:
        InputError: the run has no records, or none of this prompt.
    """
    refuse_without_records(run)
    rows = records_of(run, [key], damaged).get(key)
    if rows is None:
        raise InputError(f"{key!r} is no prompt that {run} has recorded; allowed: a prompt key (16 hexadecimal digits)")
    suspect = None
    if (run / FOLDER / SUSPECTS).exists():
        suspect = next((s for s in read_suspects(run)["suspects"] if s["key"] == key), None)
    verdict = f"stands out by {described(suspect)} since iteration {suspect['since']}" if suspect else "not flagged"
    lines = [
        f"{key} ({rows[-1]['origin']}): {verdict}",
        rows[-1]["prompt"],
        "",
        *aligned(_visits(rows)),
        "",
        "newest responses",
    ]
    for row in rows[-SHOWN:]:
        words = ", ".join(word for word in (row["finish"], row["safety"]) if word)
        said = f"  iteration {row['iteration']}, score {row['score']:g}, {words}: "
        lines.append(said + shortened(row["response"], 200))
    return "\n".join(lines)


def _visits(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A line per iteration below a head; the column ``safety`` where the filter has touched a row."""
    marked = any(row["safety"] for row in rows)
    head = ["iteration", "samples", "score", "lowest", "highest", "kl_ref", "advantage", "tokens"]
    table = [head + (["safety"] if marked else [])]
    visits: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        visits.setdefault(row["iteration"], []).append(row)
    for iteration, drawn in visits.items():
        own = [row for row in drawn if not row["safety"]]
        scores = [row["score"] for row in own]
        means = [_digits(_mean([row[name] for row in own])) for name in ("kl_ref", "advantage", "tokens")]
        spread = [_digits(value) for value in (_mean(scores), min(scores, default=None), max(scores, default=None))]
        others = Counter(row["safety"] for row in drawn if row["safety"])
        words = [", ".join(f"{count} {word}" for word, count in others.items())] if marked else []
        table.append([str(iteration), str(len(own)), *spread, *means, *words])
    return table


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
