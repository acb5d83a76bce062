"""Tokens without a finite log-probability of the engine: what ``missing_logprobs`` says happens, with each engine."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_rlhf.callbacks import CalibrationError
from lightning_rlhf.callbacks.calibrate import compare
from lightning_rlhf.rollout import HFEngine, VLLMEngine, VLLMServerEngine
from lightning_rlhf.rollout.assemble import Generated
from lightning_rlhf.rollout.server_pool import ServersGone
from lightning_rlhf.rollout.vllm import _generated
from tests.rollout.fake_vllm_server import FakeVLLMServer, changed, once
from tests.support import Recorder, fit, tiny_module, tiny_policy, weights

SIZES = {"hidden_size": 64, "seed": 3}
COMMON: dict[str, Any] = {"samples": 2, "max_new_tokens": 6}


@torch.no_grad()
def poison(model: Any) -> None:
    """The logits after the token ``*`` are NaN."""
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            parameter[TOKEN] = math.nan


TOKEN = tiny_policy(**SIZES).tokenizer("*").input_ids[0]


class PoisonedCopyHF(HFEngine):
    """With ``lag = 1`` the engine has a copy of the model; NaN in it is the engine's alone."""

    def update_weights(self, version: int) -> None:
        super().update_weights(version)
        poison(self._require_setup()[0].lm)


def poison_worker(worker: Any) -> None:
    poison(worker.get_model())


class PoisonedVLLM(VLLMEngine):
    """NaN in vLLM's weights, written after the trainer's have arrived."""

    def update_weights(self, version: int) -> None:
        super().update_weights(version)
        self._require_setup()[0].collective_rpc(poison_worker)


def drops_logprobs(server: FakeVLLMServer, body: dict[str, Any]) -> tuple[int, dict[str, Any]] | None:
    """vLLM writes -9999 for NaN and minus infinity; here for the first token of some rows."""
    answer = server.right_answer(body)
    if TOKEN in body["token_ids"]:
        answer["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
    return 200, answer


@pytest.fixture
def engine(request) -> Iterator[Any]:
    made: Any
    if request.param == "hf":
        yield PoisonedCopyHF(**COMMON, lag=1)
    elif request.param == "vllm":
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("needs vLLM")
        made = PoisonedVLLM(**COMMON, kv_cache_gib=0.25)
        yield made
        made.close()
    else:
        server = FakeVLLMServer(fault=drops_logprobs, vocabulary=tiny_policy(**SIZES).actor.lm.config.vocab_size)
        made = VLLMServerEngine([server.url], **COMMON, retry_seconds=0.02)
        yield made
        made.close()
        server.kill()


def data(module: Any) -> Any:
    from lightning_rlhf.data import PromptDataModule

    rows = [{"prompt": prompt} for i in range(8) for prompt in (f"{i}+1=", f"{i}*1=")]
    return PromptDataModule(
        rows, tokenizer=module.tokenizer, prompts_per_iteration=8, iterations=module.iterations, shuffle=False
    )


def run(engine: Any, correction: dict[str, Any] | None, **settings: Any) -> tuple[Any, list[Any], dict[str, float]]:
    settings = {"iterations": 2, **settings}
    blocks = {} if correction is None else {"rollout_correction": {"full_every": 1, **correction}}
    module = tiny_module(policy=tiny_policy(**SIZES), max_new_tokens=6, **settings, **blocks)
    module.engine, recorder = engine, Recorder()
    before = weights(module)
    trainer = fit(module, [recorder], data=data(module))
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(module).items()), "it has learned"
    assert all(tensor.isfinite().all() for tensor in weights(module).values())
    return module, [experience for experience, _ in recorder.of("on_experience_ready")], dict(trainer.callback_metrics)


@pytest.mark.parametrize(
    "engine",
    ["hf", pytest.param("vllm", marks=pytest.mark.slow), "vllm_server_fake_server"],
    indirect=True,
)
def test_missing_log_probabilities_with_each_engine_and_setting(engine):
    for setting in ("neutral", "reject"):
        _, seen, metrics = run(engine, {"rollout_is": "token", "missing_logprobs": setting})
        assert len(seen) == 2
        for experience in seen:
            missing = experience.response_mask & ~experience.rollout_logprobs.isfinite()
            rows = missing.any(-1)
            assert 0 < rows.sum() < len(rows), "some rows, not all"
            assert experience.old_logprobs.isfinite().all(), "the trainer's own"
            if setting == "neutral":
                assert torch.equal(experience.loss_mask, experience.response_mask)
                assert experience.is_weights[missing].eq(1.0).all()
            else:
                assert torch.equal(experience.loss_mask, experience.response_mask & ~rows[:, None])
        share = missing.sum() / experience.response_mask.sum()
        assert metrics["rollout_corr/missing_fraction"] == pytest.approx(float(share), rel=1e-5)
        assert metrics["rollout/logprob_abs_diff_mean"].isfinite()
    _, seen, _ = run(engine, {"bypass_mode": True, "missing_logprobs": "neutral"})
    assert all(experience.old_logprobs.isfinite().all() for experience in seen)
    with pytest.raises(
        FloatingPointError, match=r"logits of the rollout engine are not finite: response token \d .*missing_logprobs"
    ):
        run(engine, None)


def test_unified_perturbation_leaves_such_tokens_out():
    _, seen, _ = run(PoisonedCopyHF(**COMMON, lag=1), None, alp={"init_sigma": 1e-2, "ratio": "unified"})
    for experience in seen:
        assert torch.equal(experience.loss_mask, experience.response_mask & experience.rollout_logprobs.isfinite())


def test_a_probe_compares_the_tokens_with_log_probabilities():
    _, seen, _ = run(PoisonedCopyHF(**COMMON, lag=1), {}, iterations=1)
    [experience] = seen

    mask, rollout = experience.response_mask, experience.rollout_logprobs
    numbers = compare(experience.old_logprobs, rollout, mask)
    assert numbers == compare(experience.old_logprobs, rollout.nan_to_num(), mask & rollout.isfinite())
    with pytest.raises(CalibrationError, match="no finite log-probability for any token"):
        compare(experience.old_logprobs, torch.full_like(rollout, -math.inf), mask)


# --- a vLLM server, on the wire --------------------------------------------------------------------------------------


@pytest.fixture
def serve(llama, make_tokenizer) -> Iterator[Callable[..., Any]]:
    started: list[FakeVLLMServer] = []
    engines: list[VLLMServerEngine] = []

    def _serve(*faults: Any) -> tuple[VLLMServerEngine, list[FakeVLLMServer]]:
        servers = [FakeVLLMServer(fault=fault) for fault in faults]
        engine = VLLMServerEngine([server.url for server in servers], max_new_tokens=8, retries=2, retry_seconds=0.02)
        started.extend(servers)
        engines.append(engine)
        engine.setup(llama, make_tokenizer())
        engine.update_weights(0)
        return engine, servers

    yield _serve
    for engine in engines:
        engine.close()
    for server in started:
        server.kill()


def first_logprob(value: Any) -> Any:
    return changed(lambda answer: answer["choices"][0]["logprobs"]["content"][0].update(logprob=value))


@pytest.mark.parametrize("value", [-9999.0, -9999, -1e9, math.nan, -math.inf])
def test_vllms_placeholder_counts_as_missing_fake_server(serve, make_prompts, value):
    engine, _ = serve(once(first_logprob(value)))
    rollout = engine.generate(make_prompts([1, 2], [1, 3], [1, 4]), samples=1, max_new_tokens=8, seed=7)
    missing = rollout.response_mask & ~rollout.rollout_logprobs.isfinite()
    assert missing.sum() == 1 and missing[:, 0].sum() == 1


@pytest.mark.parametrize("value", [None, "NaN", True, [], {}])
def test_a_log_probability_that_is_no_number_drops_the_server_fake_server(serve, make_prompts, caplog, value):
    engine, servers = serve(first_logprob(value), None)
    prompts = make_prompts(*[[1, 2, 3 + i] for i in range(6)])
    rollout = engine.generate(prompts, samples=1, max_new_tokens=8, seed=7)
    assert rollout.rollout_logprobs.isfinite().all() and len(rollout) == 6
    assert f"{servers[0].url} is dropped" in caplog.text and "no readable response" in caplog.text
    alone, _ = serve(first_logprob(value))
    with pytest.raises(ServersGone, match="is no number"):
        alone.generate(prompts, samples=1, max_new_tokens=8, seed=7)


def test_vllm_without_log_probabilities_is_refused():
    from types import SimpleNamespace

    output = SimpleNamespace(token_ids=[3, 4], logprobs=None, finish_reason="stop")
    assert _generated(output, 1) == Generated([3, 4], [], "stop", 1), "which assemble_rollout refuses by prompt"
