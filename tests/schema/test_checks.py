"""Bad configurations are refused before any work, with key, value, what is allowed and the nearest spelling."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lightning_rlhf import schema
from lightning_rlhf.assembly import with_key
from lightning_rlhf.schema import ConfigError, Problem, check
from lightning_rlhf.schema.checks import first_look
from lightning_rlhf.schema.locate import locate, parameters_of
from lightning_rlhf.schema.signatures import declared
from lightning_rlhf.schema.spelling import FOREIGN_KEYS, hint, nearest
from lightning_rlhf.schema.trainer import REFUSED_TRAINER_OPTIONS


def problems(compose, *overrides: str) -> dict[str, str]:
    """Key -> what is allowed, of every problem that ``check`` finds; empty where it finds none."""
    try:
        schema.check(compose(*overrides))
    except ConfigError as error:
        return {problem.key: problem.allowed for problem in error.problems}
    return {}


def test_the_shipped_configuration_is_right(compose):
    assert problems(compose) == {}


BAD = {
    "negative clip range": (["module.loss.clip_low=-0.2"], "module.loss.clip_low", "a finite number > 0 and < 1"),
    "clip range that swallows the ratio": (["module.loss.clip_low=1.5"], "module.loss.clip_low", "> 0 and < 1"),
    "clip range that is no number": (["module.loss.clip_high=wide"], "module.loss.clip_high", "number"),
    "misspelt setting": (["+module.loss.clip_hihg=0.3"], "module.loss.clip_hihg", "did you mean 'clip_high'"),
    "misspelt key of a target": (["+rollout.temprature=1"], "rollout.temprature", "temperature"),
    "misspelt argument of a callback": (
        ["+callbacks.kl_early_stop.tarket=1"],
        "callbacks.kl_early_stop.tarket",
        "did you mean target?",
    ),
    "misspelt callback": (
        ["+callbacks.kl_erly_stop.target=1"],
        "callbacks.kl_erly_stop",
        "did you mean callbacks.kl_early_stop?",
    ),
    "callback that is a number": (
        ["callbacks.kl_early_stop=0.1"],
        "callbacks.kl_early_stop",
        "a block with a _target_",
    ),
    "logger that is switched off": (["logger=none", "+logger.name=x"], "logger.name", "a block with a _target_"),
    "number in place of a block": (["module.loss=3"], "module.loss", "a block of settings"),
    "misspelt block of the model": (["+model.polcy.critic=none"], "model.polcy", "nothing reads this key"),
    "misspelt top-level key": (["+iteratons=5"], "iteratons", "did you mean iterations?"),
    "unknown choice": (["module.advantage.estimator=gea"], "module.advantage.estimator", "did you mean 'gae'?"),
    "unknown reward": (
        ["reward.terms.exact_match.reward._target_=lightning_rlhf.rewards.ExactMach"],
        "reward.terms.exact_match.reward._target_",
        "did you mean lightning_rlhf.rewards.ExactMatch?",
    ),
    "unknown module of a reward": (
        ["reward.terms.exact_match.reward._target_=no_such_file.reward"],
        "reward.terms.exact_match.reward._target_",
        "there is no module 'no_such_file'",
    ),
    "target that is no import path": (
        ["reward.terms.exact_match.reward._target_=exact"],
        "reward.terms.exact_match.reward._target_",
        "import path",
    ),
    "target that is no class": (
        ["+callbacks.mine._target_=lightning_rlhf.metrics.names.REDUCTIONS"],
        "callbacks.mine._target_",
        "a class or a function",
    ),
    "missing argument": (
        ["+callbacks.mine._target_=lightning_rlhf.rewards.RegexMatch"],
        "callbacks.mine.pattern",
        "needs it",
    ),
    "argument that train supplies": (["+data.tokenizer=gpt2"], "data.tokenizer", "takes:"),
    "missing data file": (["data=jsonl", "data.train.path=nowhere.jsonl"], "data.train.path", "nowhere.jsonl"),
    "missing held-out file": (
        ["data.validation=nowhere.parquet"],
        "data.validation",
        "nowhere.parquet",
    ),
    "missing model folder": (
        ["model=hf", "model.source.path=./no/model"],
        "model.source.path",
        "no such file or folder",
    ),
    "missing package of a model": (
        ["model=hf", "model.source.path=package://no_such_package/x.gguf"],
        "model.source.path",
        "no_such_package",
    ),
    "minibatch larger than the batch": (
        ["data.prompts_per_iteration=8", "module.update.minibatch_size=9"],
        "module.update.minibatch_size",
        "at most 8",
    ),
    "micro-batch larger than the minibatch": (
        ["module.update.minibatch_size=8", "module.update.micro_batch_size=16"],
        "module.update.micro_batch_size",
        "minibatch_size = 8",
    ),
    "micro-batch smaller than a sequence": (
        ["module.update.micro_batch_tokens=4"],
        "module.update.micro_batch_tokens",
        "one longest sequence",
    ),
    "scoring budget smaller than a sequence": (
        ["module.update.score_tokens=4"],
        "module.update.score_tokens",
        "one longest sequence",
    ),
    "no iterations": (["iterations=0"], "iterations", "a whole number >= 1"),
    "half an iteration": (["iterations=1.5"], "iterations", "a whole number >= 1"),
    "half a prompt": (["data.prompts_per_iteration=2.5"], "data.prompts_per_iteration", "a whole number >= 1"),
    "no sample": (["rollout.samples=0"], "rollout.samples", "a whole number >= 1"),
    "negative seed": (["seed=-1"], "seed", "a whole number from 0"),
    "no threads": (["threads=0"], "threads", "a whole number >= 1 and <= 1024, or null"),
    "learning rate of an unknown part": (["+model.lr.reference=1"], "model.lr.reference", "nothing reads this key"),
    "gae without critic": (["model.policy.critic=none"], "module.advantage.estimator", "gae needs a critic"),
    "grpo with a critic": (
        ["module.advantage.estimator=grpo", "rollout.samples=4"],
        "model.policy.critic",
        "no use for a critic",
    ),
    "grpo with one sample": (
        ["module.advantage.estimator=grpo", "model.policy.critic=none"],
        "rollout.samples",
        "at least 2",
    ),
    "rloo with one sample": (
        ["module.advantage.estimator=rloo", "model.policy.critic=none"],
        "rollout.samples",
        "at least 2",
    ),
    "bootstrapping without critic": (
        [
            "module.advantage.estimator=reinforce_plus_plus",
            "model.policy.critic=none",
            "module.termination.truncated=bootstrap",
        ],
        "module.termination.truncated",
        "the estimator gae",
    ),
    "a cache longer than the limit": (
        ["module.termination.truncated=soft_overlong", "module.termination.overlong_cache=6"],
        "module.termination.overlong_cache",
        "at most rollout.max_new_tokens = 5",
    ),
    **{
        f"a cache of {cache}": (
            [f"module.termination.overlong_cache={cache}"],
            "module.termination.overlong_cache",
            "a finite number > 0 and < 1, a share of the length limit, or a whole number >= 1, tokens",
        )
        for cache in (0, -0.5, 1.0, 1.5, -3, "most", "true", ".nan")
    },
    "every response that ends is early, and dropped": (
        ["module.termination.early=drop", "module.termination.min_tokens=5", "rollout.max_new_tokens=5"],
        "module.termination.min_tokens",
        "must be below rollout.max_new_tokens = 5 with module.termination.early = drop",
    ),
    "unknown end": (["module.termination.early=dorp"], "module.termination.early", "did you mean 'drop'?"),
    "a penalty that rewards": (["module.termination.early_penalty=2"], "module.termination.early_penalty", "< 0"),
    "KL without reference": (["model.policy.reference=none"], "module.kl.coefficient", "model.policy.reference"),
    "no process": (["trainer.devices=0"], "trainer.devices", "a whole number >= 1"),
    "half a machine": (["+trainer.num_nodes=0.5"], "trainer.num_nodes", "a whole number >= 1"),
    "a strategy of another kind": (["+trainer.strategy=fsdp"], "trainer.strategy", "trainer=fsdp2"),
    "prompts that cannot be shared": (["trainer=ddp", "trainer.devices=3"], "data.prompts_per_iteration", "of 3"),
    "vLLM inside of two processes": (["trainer=ddp", "trainer.devices=2", "rollout=vllm"], "rollout", "vllm_server"),
    "fewer requests than processes": (
        ["trainer=ddp", "trainer.devices=4", "rollout=vllm_server", "rollout.requests_per_server=3"],
        "rollout.requests_per_server",
        "at least 4",
    ),
    "misspelt setting of Ray": (
        ["trainer=ray", "+trainer.ray.wokers=3"],
        "trainer.ray.wokers",
        "did you mean 'workers'",
    ),
    "no worker": (["trainer=ray", "trainer.ray.workers=0"], "trainer.ray.workers", "a whole number >= 1"),
    "fewer than no failure": (["trainer=ray", "trainer.ray.max_failures=-2"], "trainer.ray.max_failures", ">= -1"),
    "address that is no text": (["trainer=ray", "trainer.ray.address=3"], "trainer.ray.address", "HOST:PORT"),
    "amount that is no number": (
        ["trainer=ray", "trainer.ray.resources_per_worker={CPU: many}"],
        "trainer.ray.resources_per_worker.CPU",
        "a number >= 0",
    ),
    "arguments of Ray that are a number": (
        ["trainer=ray", "trainer.ray.init=3"],
        "trainer.ray.init",
        "a block {name: value}, or null",
    ),
    "devices beside workers": (["trainer=ray", "trainer.devices=2"], "trainer.devices", "trainer.ray.workers"),
    "device that Ray is not told of": (["trainer=ray", "trainer.accelerator=auto"], "trainer.accelerator", "cpu, gpu"),
    "workers that would not meet": (["trainer=ray", "trainer.strategy=auto"], "trainer.strategy", "RayDDPStrategy"),
    "workers without Ray": (["trainer=ray", "trainer.ray=null"], "trainer.ray", "a block of settings"),
    "prompts that workers cannot share": (
        ["trainer=ray", "trainer.ray.workers=3"],
        "data.prompts_per_iteration",
        "trainer.ray.workers",
    ),
    "vLLM inside of a worker": (["trainer=ray", "trainer.ray.workers=1", "rollout=vllm"], "rollout", "vllm_server"),
    "unset value": (["model=hf"], "model.source.path", "path"),
}


@pytest.mark.parametrize(("overrides", "key", "words"), BAD.values(), ids=BAD.keys())
def test_a_bad_value_is_one_problem_with_its_key(compose, overrides, key, words):
    found = problems(compose, *overrides)
    assert key in found, found
    assert words in found[key]
    assert len(found) == 1, "one mistake is one problem"


@pytest.mark.parametrize("name", sorted(REFUSED_TRAINER_OPTIONS))
def test_trainer_options_that_another_key_decides(compose, name):
    found = problems(compose, f"+trainer.{name}=2")
    assert list(found) == [f"trainer.{name}"]
    assert found[f"trainer.{name}"] == f"not used here: {REFUSED_TRAINER_OPTIONS[name]}"


def test_keys_named_in_the_hints_exist(compose):
    known = {key for key, _ in schema.flatten(schema.check(compose()))} | set(schema.shipped_keys())
    blocks = {key.rpartition(".")[0] for key in known}
    for foreign, ours in FOREIGN_KEYS.items():
        for key in ours.split("=")[0].split(" and "):
            assert key in known | blocks | {"reward", "model"}, f"{foreign} -> {key}"
    for text in REFUSED_TRAINER_OPTIONS.values():
        for word in text.replace(",", " ").replace(":", " ").replace("=null", " ").split():
            if "." in word:
                assert word in known | blocks, word


def test_prompts_of_any_length_are_allowed(compose):
    assert schema.check(compose("data.max_prompt_tokens=null"))["data"]["max_prompt_tokens"] is None


@pytest.mark.parametrize("group", ["alp", "experiment", "ptx", "recipe", "rollout_correction", "safety"])
def test_the_name_of_a_group_that_fills_another_block_is_no_key(compose, group):
    """``+safety.words=[...]`` would be a filter that is not there; its block is ``module.safety``."""
    assert "nothing reads this key" in problems(compose, f"+{group}.words=[x]")[f"{group}.words"]


def test_every_problem_is_reported_at_once(compose):
    found = problems(
        compose,
        "module.loss.clip_low=-1",
        "module.loss.dual_clip=0.5",
        "module.kl.estimator=k9",
        "+module.update.epoch=2",
        "+trainer.max_steps=5",
        "seed=-1",
        "+nonsense=1",
    )
    assert set(found) == {
        "module.loss.clip_low",
        "module.loss.dual_clip",
        "module.kl.estimator",
        "module.update.epoch",
        "trainer.max_steps",
        "seed",
        "nonsense",
    }


def test_an_error_shows_key_value_and_what_is_allowed():
    error = ConfigError([Problem("a.b", 3, "a number > 5"), Problem("c", "x" * 200, "short text")])
    assert str(error).splitlines()[:2] == ["a.b = 3", "    a number > 5"]
    assert max(len(line) for line in str(error).splitlines()) < 100


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("algorithm.gamma", "module.advantage.gamma"),
        ("actor_rollout_ref.rollout.n", "rollout.samples"),
        ("learning_rate", "module.actor.lr"),
        ("kl_coef", "module.kl.coefficient"),
    ],
)
def test_keys_of_other_trainers_are_translated(compose, key, expected):
    [(found, text)] = problems(compose, f"+{key}=1").items()
    assert found == key
    assert expected in text


def test_nearest_spelling():
    known = ["module.actor.lr", "module.critic.lr", "module.loss.clip_low", "module.loss.clip_high", "seed"]
    assert nearest("lr", known) == ["module.actor.lr", "module.critic.lr"]
    assert nearest("module.loss.cliphigh", known) == ["module.loss.clip_high"]
    assert nearest("modul.loss.clip_low", known) == ["module.loss.clip_low"]
    assert nearest("sed", known) == ["seed"]
    assert nearest("quite.different", known) == []
    assert hint("quite.different", known) == ""


def test_batch_arithmetic(compose):
    config = schema.check(
        compose(
            "iterations=10",
            "data.prompts_per_iteration=12",
            "rollout.samples=3",
            "module.update.minibatch_size=10",
            "module.update.epochs=2",
        )
    )
    batch = schema.batch_sizes_of(config)
    assert (batch.sequences, batch.minibatches) == (36, 4)
    assert str(batch).splitlines() == [
        "  sequences    12 prompts x 3 samples = 36 per iteration",
        "  minibatches  36 / 10 = 4 per epoch (the last one has 6)",
        "  updates      2 epochs x 4 minibatches = 8 per iteration",
        "  whole run    10 iterations: 360 sequences, 80 updates",
    ]


def test_truncated_sampling_is_warned_about_once(compose):
    assert list(schema.warnings(schema.check(compose()))) == []
    for override in ("rollout.top_k=5", "rollout.top_p=0.9"):
        [text] = schema.warnings(schema.check(compose(override)))
        assert "part of the vocabulary" in text


def test_restarts_without_checkpoints_are_warned_about(compose):
    assert list(schema.warnings(schema.check(compose("trainer=ray")))) == []
    for override in ("callbacks.checkpoint=null", "callbacks.checkpoint.dirpath=/tmp/elsewhere"):
        [text] = schema.warnings(schema.check(compose("trainer=ray", override)))
        assert "from its beginning" in text
        assert list(schema.warnings(schema.check(compose("trainer=ray", override, "trainer.ray.max_failures=0")))) == []


def test_locate_says_which_package_is_missing(tmp_path: Path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match="needs the package no_such_dependency"):
        locate("needs_more.Thing")


def test_locate_shows_an_error_in_the_file(tmp_path: Path, monkeypatch):
    (tmp_path / "half_written.py").write_text("def f(:\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match="half_written cannot be imported: SyntaxError"):
        locate("half_written.f")


def test_locate_guesses_no_module_that_a_file_imports(tmp_path: Path, monkeypatch):
    (tmp_path / "has_vowels.py").write_text("import os, re\n\ndef vowels(batch): ...\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(LookupError, match=r"has_vowels has no 'vowls'; did you mean has_vowels\.vowels\?"):
        locate("has_vowels.vowls")
    with pytest.raises(LookupError, match=r"has_vowels has no 'rs'$"):
        locate("has_vowels.rs")


def test_lora_without_its_package_is_refused_before_libraries_are_imported(compose, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    with pytest.raises(ConfigError, match=r'model\.policy\.lora = .*\n.*pip install "lightning-rlhf\[lora\]"'):
        first_look(compose("model=hf_lora", "model.source.path=x"))


def test_locate_finds_classes_and_functions():
    assert locate("pathlib.Path") is Path
    assert locate("lightning_rlhf.schema.locate.locate") is locate
    assert locate("pathlib.Path.cwd") == Path.cwd


def test_interpolations_are_resolved(compose, tmp_path):
    config = schema.check(compose())
    assert config["callbacks"]["checkpoint"]["dirpath"] == f"{tmp_path}/checkpoints"
    assert type(config["callbacks"]) is dict


@pytest.mark.parametrize(
    ("text", "block", "shown"),
    [
        ("model.policy.critic = 'x' is not allowed", "model.policy", "model.policy.critic = 'x' is not allowed"),
        ("model heads = 3 must divide", "model.source", "model.source.heads = 3 must divide"),
        ("rollouts are late", "rollout", "rollout: rollouts are late"),
        ("rollout.top_p = 2 is not allowed", "rollout", "rollout.top_p = 2 is not allowed"),
        ("no such file", "data", "data: no such file"),
    ],
)
def test_a_key_is_printed_once_in_front_of_what_a_constructor_says(text, block, shown):
    assert with_key(text, block) == shown


@pytest.mark.parametrize("engine", ["HFEngine", "VLLMEngine", "VLLMServerEngine"])
def test_the_source_tells_the_arguments_of_an_engine_and_of_its_base(engine: str) -> None:
    """Arguments read from the source without an import, as in a command's first check, equal those of the class."""
    path = f"lightning_rlhf.rollout.{engine}"
    found, parameters = declared(path), parameters_of(locate(path))
    assert found is not None and set(found.names) == set(parameters)
    assert found.annotations["lag"] == "int"


def test_a_problem_is_named_by_the_key_that_was_typed(compose) -> None:
    """``model.lr.actor`` feeds ``module.actor.lr``, which checks the value; both keys are named."""
    with pytest.raises(ConfigError) as caught:
        check(compose("model.lr.actor=-1", "module.critic.lr=-2"))
    first, second = caught.value.problems
    assert (first.key, first.value) == ("model.lr.actor", -1)
    assert first.allowed.endswith("(module.actor.lr is this value)")
    assert (second.key, second.value) == ("module.critic.lr", -2) and "is this value" not in second.allowed
