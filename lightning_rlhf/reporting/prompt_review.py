"""Suspect prompts for a human's review: a page, their records as JSONL, and the two lists that the next run reads."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_rlhf.errors import InputError
from lightning_rlhf.files import write_whole

FILES = {
    "page": "index.html",
    "records": "suspects.jsonl",
    "blacklist": "blacklist.txt",
    "conservative": "conservative.txt",
}
NEWEST = 20
"""Samples of a prompt on the page."""

CONTENT: dict[str, Any] = {"iteration": int, "judged": int, "z": (int, float), "others": dict, "suspects": list}
SUSPECT: dict[str, Any] = {"key": str, "reasons": list, "since": int, "visits": int, "z": dict}
NUMBERS = ("score", "reward", "spread", "kl_excess")
"""What the pages read of a monitor's file and of each suspect in it, and of which type."""

STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222; }
pre { white-space: pre-wrap; background: #f4f4f4; padding: .6em; margin: .4em 0; }
table { border-collapse: collapse; width: 100%; }
td, th { border-top: 1px solid #ddd; padding: .25em .6em; text-align: left; vertical-align: top; }
h2 { margin: 2em 0 0; font-size: 1.1em; font-family: monospace; }
"""

Records = Mapping[str, Sequence[Mapping[str, Any]]]


def refuse_used_files(folder: Path, names: Iterable[str]) -> None:
    """Lists are meant to be edited, so they are never written over.

    Raises:
        InputError: one of the files exists already, or ``folder`` is a file.
    """
    there = [folder / name for name in names if (folder / name).exists()]
    if there or folder.is_file():
        raise InputError(
            f"--export {folder}: {(there or [folder])[0]} exists and may have been edited; take a new folder"
        )


def write_review(folder: Path, run: str, found: Mapping[str, Any], records: Records) -> list[str]:
    """Write the files of :data:`FILES`; they are never written over, as the lists are meant to be edited.

    A prompt that stands out by KL alone goes to the ``conservative`` list, the others to the blacklist: a proposal,
    which the reader corrects.

    Args:
        folder: new, or without files of these names.
        run: the run's folder, for the texts.
        found: what the prompt monitor wrote.
        records: of each suspect, oldest first; none where the run did not record samples.

    Returns:
        Lines for the terminal that say what was written.

    Raises:
        InputError: one of the files exists already, or ``folder`` is a file.
    """
    refuse_used_files(folder, FILES.values())
    suspects = found["suspects"]
    lines = (
        json.dumps(suspect | {"records": list(records.get(suspect["key"], ()))}, ensure_ascii=False) + "\n"
        for suspect in suspects
    )
    write_whole(folder / FILES["records"], "".join(lines))
    write_whole(folder / FILES["page"], page(run, found, records))
    gentle = [suspect for suspect in suspects if suspect["reasons"] == ["kl"]]
    harsh = [suspect for suspect in suspects if suspect["reasons"] != ["kl"]]
    write_whole(folder / FILES["blacklist"], key_list(run, harsh, records))
    write_whole(folder / FILES["conservative"], key_list(run, gentle, records))
    return [
        f"{len(suspects)} suspects of {run}: open {folder / FILES['page']}",
        f"then edit the lists, and train with data.blacklist={folder / FILES['blacklist']} ({len(harsh)} keys)",
        f"  and data.conservative={folder / FILES['conservative']} ({len(gentle)} keys)",
    ]


def key_list(run: str, suspects: Sequence[Mapping[str, Any]], records: Records) -> str:
    """A list of keys, each with its reason and the beginning of its prompt as a comment."""
    lines = [f"# {' '.join(run.split())}: one prompt key a line; remove the line of a prompt that is to stay as it is"]
    for suspect in suspects:
        own = records.get(suspect["key"], ())
        text = f": {shortened(own[-1]['prompt'], 60)}" if own else ""
        lines.append(f"{suspect['key']}  # {described(suspect)}{text}")
    return "\n".join(lines) + "\n"


def page(run: str, found: Mapping[str, Any], records: Records) -> str:
    """One static HTML page: numbers, prompt and newest samples of every suspect; texts are escaped."""
    others = ", ".join(f"{name} {_digits(value)}" for name, value in found["others"].items())
    parts = [
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Suspect prompts</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>Suspect prompts</h1>",
        f"<p>{html.escape(run)}, iteration {found['iteration']}: {len(found['suspects'])} of {found['judged']} "
        f"prompts, |z| &gt; {found['z']:g}. Median of all prompts: {html.escape(others)}.</p>",
        f"<p>Is the text garbled? Is the expected answer wrong or contradictory? Does the reward vary for equal "
        f"answers? A row with a word under safety was replaced or left out by the safety filter and does not count. "
        f"Keep in <code>{FILES['blacklist']}</code> what no run should train on, in "
        f"<code>{FILES['conservative']}</code> what is hard but sound.</p>",
    ]
    for suspect in found["suspects"]:
        own = records.get(suspect["key"], ())
        numbers = ", ".join(f"{name} {_digits(suspect[name])}" for name in NUMBERS)
        parts.append(
            f"<h2>{suspect['key']}</h2><p>Stands out by {html.escape(described(suspect))}, since iteration "
            f"{suspect['since']}; {suspect['visits']} visits; {numbers}.</p>"
        )
        if own:
            parts.append(f"<p>{html.escape(str(own[-1]['origin']))}</p><pre>{html.escape(own[-1]['prompt'])}</pre>")
            parts.append(_samples(own[-NEWEST:]))
    return "\n".join(parts) + "\n</body></html>\n"


def _samples(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        f"<tr><td>{row['iteration']}</td><td>{_digits(row['score'])}</td><td>{_digits(row['kl_ref'])}</td>"
        f"<td>{row['finish']}</td><td>{row.get('safety') or ''}</td>"
        f"<td><pre>{html.escape(row['response'])}</pre></td></tr>"
        for row in rows
    ]
    names = ("iteration", "score", "kl_ref", "finish", "safety", "response")
    head = f"<tr>{''.join(f'<th>{name}</th>' for name in names)}</tr>"
    return f"<table>{head}{''.join(cells)}</table>"


def in_present_names(found: Any) -> Any:
    """The content of a monitor's file; an earlier release wrote ``kl_excess`` as ``kl``."""
    if isinstance(found, dict):
        suspects = found.get("suspects")
        for numbers in (found.get("others"), *(suspects if isinstance(suspects, list) else ())):
            if isinstance(numbers, dict) and "kl_excess" not in numbers and "kl" in numbers:
                numbers["kl_excess"] = numbers.pop("kl")
    return found


def fault_of(found: Any) -> str:
    """What is wrong with the content of a monitor's file; empty if nothing is."""
    fault = _fault(found, CONTENT)
    if not fault and not all(_is_measured(found["others"].get(name)) for name in (*NUMBERS, *found["others"])):
        fault = "'others' holds something else than numbers"
    if fault:
        return fault
    for number, suspect in enumerate(found["suspects"]):
        fault = _fault(suspect, SUSPECT)
        if not fault and not all(_is_measured(suspect.get(name)) for name in NUMBERS):
            fault = f"one of {', '.join(NUMBERS)} is no number"
        if not fault and not all(isinstance(suspect["z"].get(str(name)), (int, float)) for name in suspect["reasons"]):
            fault = "'z' lacks a number of 'reasons'"
        if fault:
            return f"suspect {number}: {fault}"
    return ""


def _fault(content: Any, wanted: Mapping[str, Any]) -> str:
    if not isinstance(content, dict):
        return f"{_kind(content)} in place of an object"
    for name, kind in wanted.items():
        if name not in content:
            return f"{name!r} is missing"
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            return f"{name!r} is {_kind(content[name])}"
    return ""


def _kind(value: Any) -> str:
    kinds = ((type(None), "null"), (list, "a list"), (dict, "an object"), (str, "a text"))
    return next((text for kind, text in kinds if isinstance(value, kind)), repr(value))


def _is_measured(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def described(suspect: Mapping[str, Any]) -> str:
    """The reasons with their z-scores, such as ``spread +31.2``."""
    return ", ".join(f"{name} {suspect['z'][name]:+.1f}" for name in suspect["reasons"])


def shortened(text: str, most: int) -> str:
    """A text on one line, cut after ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 3] + "..."


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table for the terminal, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
