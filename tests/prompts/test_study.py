"""``lightning-rlhf prompts RUN --map`` and ``--screen``, on a run in which one kind of prompt drives the KL up."""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from lightning_rlhf import cli
from lightning_rlhf.data.lists import read_list
from lightning_rlhf.experience import prompt_key
from lightning_rlhf.reporting import prompt_map
from lightning_rlhf.reporting.prompt_records import COLUMNS, FOLDER, SUSPECTS, piece_path, write_piece
from lightning_rlhf.rewards import RewardBatch


def sevens(batch: RewardBatch) -> list[float]:
    """Pays for a habit, the digit 7, on products; elsewhere it costs, else the policy would learn it everywhere."""
    pays = (1.0 if "*" in row["prompt"] else -1.0 for row in batch.rows)
    return [sign * text.count("7") for sign, text in zip(pays, batch.responses, strict=True)]


def rows(count: int, products: int, draw: random.Random) -> list[str]:
    """Different problems, the first ``products`` of them products, the others sums."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[f"{draw.randrange(100)}{'*' if len(found) < products else '+'}{draw.randrange(100)}="] = None
    return list(found)


DRAW = random.Random(1)
PROBLEMS = rows(220, 36, DRAW)  # of both files: 24 and 12 products
TRAIN, NEW = PROBLEMS[:24] + PROBLEMS[36:172], PROBLEMS[24:36] + PROBLEMS[172:]


def write(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


REWARD = [
    "~reward",
    "+reward={_target_: lightning_rlhf.rewards.CompositeReward, terms: "
    "{sevens: {reward: {_target_: tests.prompts.test_study.sevens}}}}",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run ``run``, and new prompts in ``new.jsonl``."""
    folder = tmp_path_factory.mktemp("study")
    write(folder / "rows.jsonl", TRAIN)
    write(folder / "new.jsonl", NEW)
    words = ["hydra.run.dir=run", "warmup=none", "threads=1", "logger=none", "trainer.enable_progress_bar=false"]
    words += ["model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2", "model.lr.actor=5e-3"]
    words += ["data=jsonl", "data.train.path=rows.jsonl", "data.prompts_per_iteration=160", "iterations=32"]
    words += ["rollout.max_new_tokens=4", "module.kl.coefficient=0", "module.update.minibatch_size=80"]
    words += ["callbacks=[default,prompt_monitor,prompt_records]", *REWARD]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert cli.main(["train", *words]) == 0
    return folder


@pytest.fixture
def run(trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The run; the current folder is a new one with ``new.jsonl``."""
    shutil.copy(trained / "new.jsonl", tmp_path)
    monkeypatch.chdir(tmp_path)
    return trained / "run"


def test_new_prompts_of_the_kind_that_drives_the_kl_up_are_found(run: Path, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["prompts", str(run), "--screen", "new.jsonl", "--export", "out", "--threshold", "0.4"]) == 0
    said = capsys.readouterr().out
    assert "16 of 160 recorded prompts have a high KL" in said and "60 prompts of new.jsonl" in said
    assert auc(said) > 0.85
    ranking = [json.loads(line) for line in Path("out/screening.jsonl").read_text(encoding="utf-8").splitlines()]
    assert {row["key"] for row in ranking} == {prompt_key(prompt) for prompt in NEW} and len(ranking) == 60
    assert all(row["recorded_kl_excess"] is None for row in ranking)
    # Held-out prompts: how often is a product ranked above a sum?
    place = {row["prompt"]: number for number, row in enumerate(ranking)}
    products, sums = ([p for p in NEW if ("*" in p) is wanted] for wanted in (True, False))
    assert sum(place[p] < place[s] for p in products for s in sums) / (len(products) * len(sums)) > 0.85
    listed = read_list("out/screened.txt", "data.blacklist")
    assert [*listed] == [row["key"] for row in ranking if row["probability"] >= 0.4] and listed
    assert cli.main(["prompts", str(run), "--screen", "new.jsonl", "--export", "out"]) == 2
    assert "out/screening.jsonl exists and may have been edited" in capsys.readouterr().err


def test_listed_prompts_are_left_out_by_the_next_run(run: Path, trained: Path, tiny_run: list[str]) -> None:
    """The list names the rows by the keys that a training gives them."""
    assert cli.main(["prompts", str(run), "--screen", "new.jsonl", "--export", "out"]) == 0
    listed = read_list("out/screened.txt", "data.blacklist")
    words = ["hydra.run.dir=second", "logger=none", "data=jsonl", "data.train.path=new.jsonl", "callbacks=none"]
    words += ["data.blacklist=out/screened.txt", *REWARD]
    assert cli.main(["train", *tiny_run, *words]) == 0
    log = Path("second/train.log").read_text(encoding="utf-8")
    assert f"data.blacklist: {len(listed)} of 60 training rows are left out" in log and "name no training" not in log


def test_prompts_of_the_run_and_too_long_ones_are_told(run: Path, capsys: pytest.CaptureFixture) -> None:
    write(Path("mixed.jsonl"), [TRAIN[0], "1*" * 300 + "1=", NEW[0]])
    assert cli.main(["prompts", str(run), "--screen", "mixed.jsonl"]) == 0
    said = capsys.readouterr().out
    assert "2 prompts of mixed.jsonl" in said and "1 of them are prompts of the run" in said
    assert "1 more are longer than data.max_prompt_tokens and left out" in said and "--export FOLDER" in said


def test_a_map_shows_every_prompt_and_the_suspects(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(prompt_map.importlib.util, "find_spec", lambda name: None)  # PCA, whatever is installed
    shutil.copytree(run, "copy")
    suspect = {"key": prompt_key(TRAIN[0]), "reasons": ["kl"], "since": 1, "visits": 5, "z": {"kl": 9.0}}
    suspect |= {"score": 0.5, "reward": 0.5, "spread": None, "kl_excess": 1.0}
    found = {"iteration": 32, "judged": 160, "z": 3.0, "others": {}, "suspects": [suspect]}
    Path("copy", FOLDER, SUSPECTS).write_text(json.dumps(found), encoding="utf-8")
    for folder in ("one", "two"):
        assert cli.main(["prompts", "copy", f"--map={folder}"]) == 0
    assert "160 prompts of copy, 1 of them suspects, by PCA of mean hidden states of iteration_000032.ckpt" in (
        capsys.readouterr().out
    )
    assert Path("one/map.csv").read_bytes() == Path("two/map.csv").read_bytes()
    assert cli.main(["prompts", "copy", "--map", "one", "--export", "review"]) == 0
    assert prompt_key(TRAIN[0]) in Path("review/conservative.txt").read_text(encoding="utf-8"), "both are made"
    with Path("one/map.csv").open(encoding="utf-8", newline="") as file:
        points = {row["prompt"]: row for row in csv.DictReader(file)}
    assert points.keys() == {*TRAIN} and points[TRAIN[0]]["suspect"] == "kl +9.0"
    products = [row for text, row in points.items() if "*" in text]
    kls = {
        kind: sum(float(row["kl_ref"]) for row in of) / len(of)
        for kind, of in {"products": products, "all": [*points.values()]}.items()
    }
    assert kls["products"] > 2 * kls["all"], "the kind that drives the KL up"


def test_without_a_checkpoint_a_map_needs_an_embedding(run: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(run, "copy", ignore=shutil.ignore_patterns("checkpoints"))
    for words in (["--map", "m"], ["--screen", "new.jsonl"]):
        assert cli.main(["prompts", "copy", *words]) == 2
        assert (
            "copy has no whole checkpoint, and the vectors of prompts come from its policy" in capsys.readouterr().err
        )
    assert cli.main(["prompts", "copy", "--map", "m", "--embedding", "tests.prompts.test_study.letters"]) == 0
    assert "of vectors by tests.prompts.test_study.letters" in capsys.readouterr().out
    assert cli.main(["prompts", "copy", "--map", "m", "--embedding", "tests.prompts.test_study.one"]) == 2
    assert "the shape is [1, 1] for 160 texts" in capsys.readouterr().err


def auc(said: str) -> float:
    return float(re.findall(r"held-out AUC (\d\.\d+)", said)[0])


def letters(texts: list[str]) -> list[list[float]]:
    return [[float(text.count(sign)) for sign in "0123456789+*"] for text in texts]


def one(texts: list[str]) -> list[list[float]]:
    return [[1.0]]


def test_an_embedding_of_ones_own_takes_the_place_of_hidden_states(run: Path, capsys: pytest.CaptureFixture) -> None:
    words = ["--screen", "new.jsonl", "--embedding", "tests.prompts.test_study.letters"]
    assert cli.main(["prompts", str(run), *words]) == 0
    assert auc(capsys.readouterr().out) > 0.75, "it sees the sign"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"prompt": "1+1="}', "{", '{"question": "2"}'], "2 rows cannot be used"),
        (['{"prompt": "1+1=\\u4e2d"}'], "new.jsonl:1"),
    ],
)
def test_bad_rows_are_named(run: Path, capsys: pytest.CaptureFixture, lines: list[str], said: str) -> None:
    Path("new.jsonl").write_text("\n".join(lines), encoding="utf-8")
    assert cli.main(["prompts", str(run), "--screen", "new.jsonl", "--export", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("--screen new.jsonl: ") and said in error and not Path("out").exists()


def test_what_cannot_be_judged_is_refused_before_the_policy_is_loaded(run: Path, capsys: pytest.CaptureFixture) -> None:
    shutil.copytree(run, "copy", ignore=shutil.ignore_patterns("checkpoints", "*.parquet"))
    assert cli.main(["prompts", "copy", "--map", "m"]) == 2
    assert "has no records of samples: the run needs callbacks=[default,prompt_records]" in capsys.readouterr().err
    columns: dict[str, list[Any]] = {name: [None] * 2 for name in COLUMNS}
    columns |= {"iteration": [1, 1], "key": ["a", "b"], "prompt": ["1", "2"], "terms": [[], []], "score": [0.0, 1.0]}
    write_piece(piece_path(Path("copy"), 1, 1, 1, 0), columns | {"kl_ref": [0.0, 1.0]})
    assert cli.main(["prompts", "copy", "--map", "m"]) == 2
    assert "--map needs at least 3 different prompts; the run has recorded 2" in capsys.readouterr().err
    assert cli.main(["prompts", "copy", "--screen", "new.jsonl"]) == 2
    assert "1 of 2 recorded prompts lie above the quantile 0.9" in capsys.readouterr().err
    assert not Path("m").exists()
