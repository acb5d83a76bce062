"""The verb ``prompts``: the suspects of a run, one prompt's history, and lists and a page for their review."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_rlhf.errors import InputError
from lightning_rlhf.files import as_file
from lightning_rlhf.reporting.prompt_records import FOLDER, SUSPECTS, pieces, read_records
from lightning_rlhf.reporting.prompt_review import described, fault_of, shortened, write_review
from lightning_rlhf.runs.folder import STARTS

SHOWN = 5
"""Responses that ``--why`` prints."""
SWITCH_ON = "callbacks=[default,prompt_monitor,prompt_records]"


@dataclass(frozen=True)
class Options:
    """What the command asks for.

    Attributes:
        run: folder of a run, or ``latest``.
        why: a prompt key whose history is shown.
        export: folder for the lists and the page.
    """

    run: str
    why: str | None = None
    export: str | None = None

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Options:
        """From the arguments after the verb.

        Raises:
            InputError: no run, several, an unknown flag, or a flag without its value.
        """
        runs: list[str] = []
        flags: dict[str, str] = {}
        words = iter(arguments)
        for word in words:
            name, equals, value = word.partition("=")
            if name in ("--why", "--export"):
                value = value if equals else next(words, "")
                if not value or value.startswith("--"):
                    raise InputError(f"{name} needs a value: {'a prompt key' if name == '--why' else 'a folder'}")
                flags[name[2:]] = value
            elif word.startswith("-"):
                raise InputError(f"{word} is no flag of prompts; there are --why KEY and --export FOLDER")
            else:
                runs.append(word)
        if len(runs) != 1:
            found = "none" if not runs else ", ".join(runs)
            raise InputError(f"prompts needs the folder of one run, or latest; given: {found}")
        return cls(runs[0], **flags)


def show(options: Options) -> None:
    """Print what is asked for, and write the export.

    Raises:
        InputError: no such run, nothing recorded, an unknown key, or a folder in use.
    """
    run = find_run(options.run)
    if options.why is not None:
        print(history(run, options.why))
    if options.export is not None:
        found = read_suspects(run)
        records = records_of(run, [suspect["key"] for suspect in found["suspects"]])
        if not records and found["suspects"]:
            print(f"note: {run / FOLDER} has no records, so texts and responses are missing; next time {SWITCH_ON}")
        print("\n".join(write_review(Path(options.export).expanduser(), str(run), found, records)))
    if options.why is None and options.export is None:
        print(listing(run))


def find_run(where: str) -> Path:
    """The folder that ``where`` names; ``latest`` is the run below ``outputs`` that was started last.

    Raises:
        InputError: there is no such run, or nothing is recorded about its prompts.
    """
    if where == "latest":
        found = [path.parent for path in Path("outputs").rglob(STARTS)]
        if not found:
            raise InputError("latest is not allowed: there is no run below outputs/ of the current folder")
        run = max(found, key=lambda folder: (folder / STARTS).stat().st_mtime)
    else:
        run = Path(where).expanduser()
    if not run.is_dir():
        raise InputError(f"{where!r} does not exist; allowed: the output folder of a run, or latest")
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
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if fault := fault_of(found):
        raise InputError(f"{path} is not as callbacks.prompt_monitor writes it: {fault}")
    return found


def records_of(run: Path, keys: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    """The records of some prompts, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_records(run, keys=list(keys)):
        found.setdefault(row["key"], []).append(row)
    for rows in found.values():
        rows.sort(key=lambda row: row["iteration"])  # pieces of several ranks follow one another
    return found


def listing(run: Path) -> str:
    """The suspects with reasons and numbers, one line each, the farthest first."""
    found = read_suspects(run)
    suspects, others = found["suspects"], found["others"]
    head = (
        f"{run}, iteration {found['iteration']}: {len(suspects)} of {found['judged']} prompts stand out from the "
        f"others (|z| > {found['z']:g})"
    )
    if not suspects:
        return head
    records = records_of(run, [suspect["key"] for suspect in suspects])
    rows = [["prompt key", "stands out by", "score", "spread", "kl", "visits", "since", "prompt"]]
    for suspect in suspects:
        own = records.get(suspect["key"], [])
        numbers = [_digits(suspect[name]) for name in ("score", "spread", "kl")]
        text = shortened(own[-1]["prompt"], 40) if own else "(not recorded)"
        rows.append([suspect["key"], described(suspect), *numbers, str(suspect["visits"]), str(suspect["since"]), text])
    rows.append(["median of all", "", *(_digits(others[name]) for name in ("score", "spread", "kl")), "", "", ""])
    more = [
        "score: mean; spread: deviation of the samples; kl: nats per token above the iteration's median prompt",
        f"one prompt's history:   lightning-rlhf prompts {run} --why KEY",
        f"review, lists to edit:  lightning-rlhf prompts {run} --export FOLDER",
    ]
    return "\n".join([head, "", *_aligned(rows), "", *more])


def history(run: Path, key: str) -> str:
    """One prompt: its text, what the monitor says, a line per iteration, and its newest responses.

    Raises:
        InputError: the run has no records, or none of this prompt.
    """
    if not pieces(run):
        raise InputError(f"{run / FOLDER} has no records of samples: the run needs callbacks=[default,prompt_records]")
    rows = records_of(run, [key]).get(key)
    if rows is None:
        raise InputError(f"{key!r} is no prompt that {run} has recorded; allowed: a prompt key (16 hexadecimal digits)")
    suspect = None
    if (run / FOLDER / SUSPECTS).exists():
        suspect = next((s for s in read_suspects(run)["suspects"] if s["key"] == key), None)
    verdict = f"stands out by {described(suspect)} since iteration {suspect['since']}" if suspect else "not flagged"
    table = [["iteration", "samples", "score", "lowest", "highest", "kl", "advantage", "tokens"]]
    visits: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        visits.setdefault(row["iteration"], []).append(row)
    for iteration, own in visits.items():
        scores = [row["score"] for row in own]
        means = [_digits(_mean([row[name] for row in own])) for name in ("kl_ref", "advantage", "tokens")]
        spread = [_digits(value) for value in (_mean(scores), min(scores), max(scores))]
        table.append([str(iteration), str(len(own)), *spread, *means])
    lines = [
        f"{key} ({rows[-1]['origin']}): {verdict}",
        rows[-1]["prompt"],
        "",
        *_aligned(table),
        "",
        "newest responses",
    ]
    for row in rows[-SHOWN:]:
        said = f"  iteration {row['iteration']}, score {row['score']:g}, {row['finish']}: "
        lines.append(said + shortened(row["response"], 200))
    return "\n".join(lines)


def _mean(values: Sequence[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return sum(measured) / len(measured) if measured else None


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
