"""The map: coordinates, figure and table."""

from __future__ import annotations

import csv
import importlib.util
from pathlib import Path

import pytest
import torch

from lightning_rlhf.errors import InputError
from lightning_rlhf.functional.projection import principal_components
from lightning_rlhf.reporting.prompt_map import FILES, Plane, draw, plane_of, write_map
from lightning_rlhf.reporting.prompt_table import RecordedPrompt


def prompt(number: int, kl: float | None = 0.0) -> RecordedPrompt:
    return RecordedPrompt(f"{number:016x}", f"prompt {number},\n<x>", 2, 4, number / 8, kl, kl)


PROMPTS = [prompt(number, number**2 / 100) for number in range(20)]
VECTORS = torch.randn(20, 6, generator=torch.Generator().manual_seed(1))
PLANE = Plane(principal_components(VECTORS), "PCA")


def test_a_plane_is_the_same_every_time_and_says_how_it_was_made() -> None:
    first, second = plane_of(VECTORS), plane_of(VECTORS)
    torch.testing.assert_close(first.points, second.points, rtol=0, atol=0)
    assert first.points.shape == (20, 2) and first.points.isfinite().all()
    if importlib.util.find_spec(name="umap") is None:
        assert first.method == "PCA"
        torch.testing.assert_close(first.points, PLANE.points, rtol=0, atol=0)
    else:
        assert first.method == "UMAP"
    few = plane_of(VECTORS[:15])
    assert few.method == "PCA", "UMAP needs more points than it keeps together"
    torch.testing.assert_close(few.points, principal_components(VECTORS[:15]), rtol=0, atol=0)


def test_two_prompts_are_too_few() -> None:
    with pytest.raises(InputError, match="--map needs at least 3 different prompts; the run has recorded 2"):
        plane_of(VECTORS[:2])


def test_the_figure_has_a_point_for_every_prompt_in_both_panels_and_rings_suspects() -> None:
    suspects = {PROMPTS[3].key: "kl +5.0", PROMPTS[7].key: "spread +4.0", "0123": "not recorded"}
    figure = draw("out$puts/a_b", PROMPTS, PLANE, vectors="hidden states", suspects=suspects)
    left, right, *bars = figure.axes
    assert len(bars) == 2 and "20 prompts of out$puts/a_b\nPCA of hidden states" in figure.get_suptitle()
    assert (left.get_title(), right.get_title()) == ("mean KL to the reference, nats per token", "mean score")
    for panel, values in ((left, [p.kl or 0.0 for p in PROMPTS]), (right, [p.score for p in PROMPTS])):
        dots, rings = panel.collections
        shown = sorted(zip(dots.get_offsets().tolist(), dots.get_array().tolist(), strict=True))
        assert shown == sorted(zip(PLANE.points.tolist(), values, strict=True)), "each point has its own colour"
        assert dots.get_array().tolist() == sorted(map(float, values)), "high values lie on top"
        assert rings.get_offsets().tolist() == PLANE.points[[3, 7]].tolist()
        assert panel.get_xlabel() == "PCA 1"
    assert [text.get_text() for text in left.texts] == [PROMPTS[3].key, PROMPTS[7].key]


def test_one_enormous_kl_does_not_take_the_colours_from_the_others() -> None:
    prompts = [*PROMPTS[:19], prompt(19, 1e6)]
    dots = draw("run", prompts, PLANE, vectors="x", suspects={}).axes[0].collections[0]
    assert dots.get_clim() == pytest.approx((0.01, 3.24)), "the second and the last but one"
    assert dots.colorbar and dots.colorbar.extend == "both", "the colour bar says that values lie beyond its ends"
    equal = [prompt(8, 1.0) for _ in range(20)]
    dots = draw("run", equal, PLANE, vectors="x", suspects={}).axes[0].collections[0]
    assert dots.colorbar and dots.colorbar.extend == "neither"
    two_low = [prompt(number, float(number > 1)) for number in range(20)]
    dots = draw("run", two_low, PLANE, vectors="x", suspects={}).axes[0].collections[0]
    assert dots.colorbar and dots.colorbar.extend == "neither" and dots.get_clim() == (0.0, 1.0)


def test_prompts_without_a_kl_are_grey() -> None:
    some = [*PROMPTS[:18], prompt(18, None), prompt(19, None)]
    left = draw("run", some, PLANE, vectors="x", suspects={}).axes[0]
    assert [len(dots.get_offsets()) for dots in left.collections] == [2, 18]
    none = [prompt(number, None) for number in range(20)]
    figure = draw("run", none, PLANE, vectors="x", suspects={})
    assert figure.axes[0].get_title().endswith("not recorded") and len(figure.axes) == 3, "one colour bar"


def test_figure_and_table_are_written_and_the_table_finds_the_prompt_of_a_point(tmp_path: Path) -> None:
    prompts = [*PROMPTS[:19], prompt(19, None)]
    for _ in range(2):  # an earlier map is replaced
        said = write_map(tmp_path / "map", "run", prompts, PLANE, vectors="x", suspects={PROMPTS[2].key: "kl +5.0"})
    assert said[0] == "20 prompts of run, 1 of them suspects, by PCA of x:"
    assert {path.name for path in (tmp_path / "map").iterdir()} == set(FILES.values())
    assert (tmp_path / "map" / FILES["figure"]).read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "map" / FILES["table"]).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["key"] for row in rows] == [p.key for p in prompts]
    found = torch.tensor([[float(row["x"]), float(row["y"])] for row in rows], dtype=torch.float64)
    torch.testing.assert_close(found, PLANE.points, rtol=1e-5, atol=0)
    assert rows[2] | {"x": "", "y": ""} == {
        **{"key": PROMPTS[2].key, "x": "", "y": "", "kl_ref": "0.04", "kl_excess": "0.04", "score": "0.25"},
        **{"visits": "2", "samples": "4", "suspect": "kl +5.0", "prompt": "prompt 2, <x>"},
    }
    assert rows[19]["kl_ref"] == "" and rows[1]["suspect"] == ""


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "map").touch()
    with pytest.raises(InputError, match="is a file; allowed is a folder"):
        write_map(tmp_path / "map", "run", PROMPTS, PLANE, vectors="x", suspects={})
