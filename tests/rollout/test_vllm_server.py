"""The engine of vLLM servers, against an HTTP server in this process that fails on demand."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from threading import Barrier, Thread
from typing import Any

import pytest
import torch

from lightning_rlhf import cli
from lightning_rlhf.checkpoint import latest_valid
from lightning_rlhf.experience import Finish, sample_seed
from lightning_rlhf.rollout import server_pool as pool_module
from lightning_rlhf.rollout import vllm_worker
from lightning_rlhf.rollout.server_client import RequestRefused
from lightning_rlhf.rollout.server_pool import ServersGone
from lightning_rlhf.rollout.vllm_server import VLLMServerEngine
from lightning_rlhf.rollout.weight_receiver import Receipt
from tests.rollout.fake_vllm_server import FakeVLLMServer, changed, dies_at, once, response_to, slow
from tests.rollout.real_vllm_servers import free_port

SEED = 7


@pytest.fixture
def start() -> Iterator[Callable[..., FakeVLLMServer]]:
    """``start(fault=..., **facts)``: a server with the end points of vLLM's."""
    servers = []

    def _start(**options: Any) -> FakeVLLMServer:
        servers.append(FakeVLLMServer(**options))
        return servers[-1]

    yield _start
    for server in servers:
        server.kill()


@pytest.fixture
def connect(llama, make_tokenizer) -> Iterator[Callable[..., VLLMServerEngine]]:
    """``connect(server, ...)``: an engine on these servers, set up, that does not wait long."""
    engines = []

    def _connect(*servers: FakeVLLMServer, **settings: Any) -> VLLMServerEngine:
        settings = {"samples": 2, "max_new_tokens": 8, "retry_seconds": 0.02, "request_timeout": 5.0} | settings
        engines.append(VLLMServerEngine([server.url for server in servers], **settings))
        engines[-1].setup(llama, make_tokenizer())
        engines[-1].update_weights(0)
        return engines[-1]

    yield _connect
    for engine in engines:
        engine.close()


@pytest.fixture
def batch(make_prompts):
    return make_prompts(*[[1, 2, 3 + i] for i in range(12)])


def draw(engine: VLLMServerEngine, prompts: Any, **options: Any) -> Any:
    return engine.generate(prompts, **({"samples": 2, "max_new_tokens": 8, "seed": SEED} | options))


def assert_complete(rollout: Any, prompts: Any, samples: int = 2, limit: int = 8) -> None:
    """Every row is in its place, once, with the tokens that follow from its own seed."""
    assert len(rollout) == len(prompts) * samples
    for row in range(len(rollout)):
        seed = sample_seed(SEED, prompts.keys[row // samples], row % samples, prompts.passes[row // samples])
        ids = response_to(seed, limit)
        assert rollout.seed[row] == seed
        assert rollout.response_ids[row][rollout.response_mask[row]].tolist() == ids
        expected = torch.tensor([-i / 64 for i in ids])
        assert torch.equal(rollout.rollout_logprobs[row][rollout.response_mask[row]], expected)
        assert rollout.finish[row] == (Finish.TRUNCATED if len(ids) == limit else Finish.NATURAL)


# --- work ------------------------------------------------------------------------------------------------------------


def test_rows_come_back_in_order_and_both_servers_work_fake_server(start, connect, batch):
    servers = [start(), start()]
    engine = connect(*servers)
    engine.update_weights(3)
    rollout = draw(engine, batch)
    assert_complete(rollout, batch)
    assert rollout.policy_version.tolist() == [3] * 24
    assert rollout.group.tolist() == [i for i in range(12) for _ in range(2)]
    assert [len(server.requests) for server in servers] == [12, 12]


def test_samples_do_not_depend_on_the_number_of_servers_fake_server(start, connect, batch):
    alone, shared = draw(connect(start()), batch), draw(connect(start(), start(), start()), batch)
    assert torch.equal(alone.response_ids, shared.response_ids)
    assert torch.equal(alone.rollout_logprobs, shared.rollout_logprobs)


def test_rows_of_a_prompt_share_a_server_fake_server(start, connect, batch):
    servers = [start(), start()]
    draw(connect(*servers), batch, samples=4)
    first, second = ({tuple(request["token_ids"]) for request in server.requests} for server in servers)
    assert len(first) == len(second) == 6 and not first & second


def test_a_slow_server_gets_less_fake_server(start, connect, batch):
    quick, sluggish = start(), start(fault=slow(0.2))
    assert_complete(draw(connect(quick, sluggish, requests_per_server=2), batch), batch)
    assert len(quick.requests) > 2 * len(sluggish.requests)


def test_no_server_gets_more_requests_at_a_time_than_allowed_fake_server(start, connect, batch):
    running, most = [0], [0]

    def count(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        with server.lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        slow(0.01)(server, body)
        with server.lock:
            running[0] -= 1

    draw(connect(start(fault=count), requests_per_server=3), batch)
    assert most == [3]


def test_content_of_a_request_fake_server(start, llama, make_tokenizer, make_prompts):
    server = start()
    engine = VLLMServerEngine([server.url], temperature=0.7, top_k=5, top_p=0.9, stop_token_ids=[9])
    engine.setup(llama, make_tokenizer(eos=4))
    engine.update_weights(0)
    prompts = make_prompts([5, 6, 7], data_pass=2)
    draw(engine, prompts, samples=1)
    draw(engine, prompts, samples=1, greedy=True)
    engine.ignore_eos = True
    draw(engine, prompts, samples=1)
    engine.close()
    sampled, greedy, endless = (request["sampling_params"] for request in server.requests)
    assert sampled == {
        **{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "max_tokens": 8, "logprobs": 0, "detokenize": False},
        **{"ignore_eos": True, "stop_token_ids": [4, 9], "seed": sample_seed(SEED, prompts.keys[0], 0, 2)},
    }
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, 0, 1.0)
    assert endless["stop_token_ids"] == []
    assert server.requests[0]["token_ids"] == [5, 6, 7]


# --- servers that fail -----------------------------------------------------------------------------------------------


def test_a_server_dies_in_the_middle_of_a_batch_fake_server(start, connect, batch, caplog):
    dying, other = start(fault=dies_at(5)), start(fault=slow(0.01))
    engine = connect(dying, other, requests_per_server=4, retry_seconds=30.0)
    with caplog.at_level(logging.WARNING):
        assert_complete(draw(engine, batch), batch)
    assert len(dying.requests) >= 5 and f"{dying.url} is dropped" in caplog.text
    assert_complete(draw(engine, batch), batch)


ANSWERS = {
    "error 500": lambda server, body: (500, {"error": {"message": "out of memory"}}),
    "aborted": changed(lambda a: a["choices"][0].update(finish_reason="abort")),
    "no log-probabilities": changed(lambda a: a["choices"][0].update(logprobs=None)),
    "log-probabilities of other tokens": changed(lambda a: a["choices"][0]["token_ids"].append(3)),
    "two choices": changed(lambda a: a["choices"].append(a["choices"][0])),
    "answers the request before again": lambda server, body: (200, server.previous) if server.previous else None,
    "hangs": slow(2.0),
}


@pytest.mark.parametrize("fault", ANSWERS.values(), ids=ANSWERS)
def test_a_bad_answer_is_not_counted_and_asked_for_again_fake_server(start, connect, batch, fault):
    bad, good = start(fault=fault), start()
    engine = connect(bad, good, requests_per_server=1, request_timeout=0.5, retry_seconds=30.0)
    assert_complete(draw(engine, batch), batch)
    assert [member.ready for member in engine._pool.members] == [False, True]


def test_a_server_that_returns_gets_the_weights_before_work_fake_server(start, connect, batch):
    dying, other = start(fault=dies_at(3)), start(fault=slow(0.03))
    engine = connect(dying, other, requests_per_server=2)
    engine.update_weights(1)
    returned: list[FakeVLLMServer] = []

    def restart(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        with server.lock:
            if len(server.requests) == 6:
                returned.append(start(port=dying.port))
        slow(0.03)(server, body)

    other.fault = restart
    assert_complete(draw(engine, batch), batch)
    [back] = returned
    assert back.calls[:8] == [
        *("rlhf_describe", "rlhf_held", "/weight_info"),
        *("/pause", "rlhf_receive", "/reset_prefix_cache", "/update_weight_version", "/resume"),
    ]
    assert len(back.requests) > 0 and set(back.sampled_with) == {engine._label}


def test_a_server_restarted_unnoticed_is_caught_by_its_weights_fake_server(start, connect, batch, caplog):
    def forget(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        server.label, server.held, server.weights = "default", "", {}

    restarted = start(fault=once(forget))
    engine = connect(restarted)
    assert_complete(draw(engine, batch), batch)
    assert "sampled with the weights ['default']" in caplog.text
    assert restarted.calls.count("rlhf_receive") >= 2 and restarted.label == engine._label


def test_all_servers_gone_is_one_clear_error_after_bounded_retries_fake_server(start, connect, batch, monkeypatch):
    servers = [start(fault=dies_at(2)), start(fault=dies_at(2))]
    engine = connect(*servers, retries=4, retry_seconds=0.5)
    pauses: list[float] = []
    monkeypatch.setattr(pool_module.time, "sleep", pauses.append)
    with pytest.raises(ServersGone, match="no rollout server is left") as caught:
        draw(engine, batch)
    assert pauses == [0.5, 1.0, 2.0, 4.0]
    assert all(server.url in str(caught.value) for server in servers) and "refused" in str(caught.value)


def test_all_servers_gone_and_one_back_in_time_fake_server(start, connect, batch, monkeypatch):
    only = start(fault=dies_at(2))
    engine = connect(only)
    monkeypatch.setattr(pool_module.time, "sleep", lambda seconds: start(port=only.port) if seconds > 0.05 else None)
    assert_complete(draw(engine, batch), batch)


def test_one_response_that_no_server_can_give_fake_server(start, connect, batch):
    servers = [start(fault=ANSWERS["error 500"]) for _ in range(2)]
    with pytest.raises(ServersGone, match=r"one response was asked for 3 times.*out of memory"):
        draw(connect(*servers, retries=2), batch)


def test_a_request_that_is_refused_ends_the_batch_fake_server(start, connect, batch):
    refusal = {"error": {"message": "max_tokens is too large"}}
    servers = [start(fault=lambda server, body: (400, refusal)), start(fault=slow(5.0))]
    with pytest.raises(RequestRefused, match=r"answered 400: max_tokens is too large"):
        draw(connect(*servers), batch)


# --- weights ---------------------------------------------------------------------------------------------------------


def held(server: FakeVLLMServer, lm: Any) -> bool:
    own = dict(lm.named_parameters())
    return server.weights.keys() == own.keys() and all(torch.equal(server.weights[n], p) for n, p in own.items())


def test_every_update_reaches_every_server_fake_server(start, connect, batch, llama):
    servers = [start(), start()]
    engine = connect(*servers)
    draw(engine, batch)
    assert all(held(server, llama) for server in servers)
    for version in (1, 2):
        with torch.no_grad():
            llama.lm_head.weight.add_(1.0)
        assert not any(held(server, llama) for server in servers)
        engine.update_weights(version)
        assert all(held(server, llama) for server in servers)
        assert draw(engine, batch).policy_version.unique().tolist() == [version]


def test_a_server_that_misses_an_update_gets_no_work_until_it_has_it_fake_server(start, connect, batch):
    failing, other = start(), start()
    engine = connect(failing, other, retry_seconds=30.0)
    draw(engine, batch)
    receive, done = failing.rlhf_receive, len(failing.requests)
    failing.rlhf_receive = lambda source, token, label: {"error": "ValueError: lm_head.weight (0 of 4096)"}
    engine.update_weights(1)
    assert "did not take over the weights: ValueError: lm_head.weight" in engine._pool.causes()
    failing.fault = None
    engine._pool.probe = lambda *_: None
    assert_complete(draw(engine, batch), batch)
    assert len(failing.requests) == done
    failing.rlhf_receive = receive
    engine.update_weights(2)
    assert_complete(draw(engine, batch), batch)
    assert len(failing.requests) > done and engine._pool.causes() == ""


def test_a_damaged_part_is_refused_fake_server(start, connect):
    server = start()
    engine = connect(server, weights_part_mib=1)
    engine.update_weights(1)
    store = engine._store
    store._parts[0] = store._parts[0][:-1] + bytes([store._parts[0][-1] ^ 1])
    server.held = ""
    engine._pool.bring_up(engine._make_ready)
    assert "part 0 of the weights" in engine._pool.causes() and "sha256 is wrong" in engine._pool.causes()


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"vocabulary": 51}, "a vocabulary of 51, the trainer's model has 50"),
        ({"logprobs_mode": "raw_logprobs"}, "reports raw_logprobs.*processed_logprobs are needed"),
    ],
)
def test_a_server_that_does_not_fit_is_refused_at_the_start_fake_server(start, connect, facts, message):
    with pytest.raises(ValueError, match=f"rollout.urls: .*{message}"):
        connect(start(), start(**facts))


def test_prompts_too_long_for_the_server_fake_server(start, connect, batch):
    with pytest.raises(ValueError, match=r"max_new_tokens = 8 and the 3 tokens of prompt \w+ exceed the 10 positions"):
        draw(connect(start(max_model_len=10)), batch)


def test_no_server_at_the_start_fake_server(start, connect):
    gone = start()
    gone.kill()
    with pytest.raises(ServersGone, match=rf"{gone.url}.*refused"):
        connect(gone, retries=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": "http://a:1"}, "urls = 'http://a:1' is not allowed"),
        ({"urls": []}, "urls"),
        ({"urls": ["http://a:1", "http://a:1"]}, "different"),
        ({"urls": ["a:8000"]}, "rollout.urls holds 'a:8000'"),
        ({"urls": ["http://a"]}, "http://host:port"),
        ({"urls": ["http://a:b"]}, "http://host:port"),
        ({"requests_per_server": 0}, "rollout.requests_per_server = 0 is not allowed"),
        ({"request_timeout": 0}, "rollout.request_timeout = 0"),
        ({"retries": -1}, "rollout.retries = -1"),
        ({"retry_seconds": float("inf")}, "rollout.retry_seconds = inf"),
        ({"weights_part_mib": 0}, "rollout.weights_part_mib"),
        ({"weights_port": "x"}, "rollout.weights_port"),
        ({"temperature": 0.001}, "rollout.temperature = 0.001 is not allowed: a number >= 0.01"),
        ({"stop_token_ids": 3}, "rollout.stop_token_ids = 3"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMServerEngine(**({"urls": ["http://127.0.0.1:1"]} | settings))


def test_an_address_that_cannot_be_listened_on_fake_server(start, connect):
    with pytest.raises(ValueError, match=r"rollout.weights_host = '192.0.2.1'.*cannot be listened on"):
        connect(start(), weights_host="192.0.2.1")


def test_describe_fake_server(start, connect):
    servers = [start(), start(dtype="bfloat16", quantization="fp8")]
    described = connect(*servers, lag=1).describe()
    assert (described["engine"], described["samples"], described["lag"]) == ("vllm_server", 2, 1)
    assert (described["dtype"], described["quantization"]) == ("bfloat16", "fp8"), "the coarsest"
    assert described["servers"] == {server.url: server.facts for server in servers}


def test_where_weights_are_offered_fake_server(start, connect):
    port = free_port()
    store = connect(start(), weights_port=port, weights_part_mib=3)._store
    assert (store.url, store.part_bytes) == (f"http://127.0.0.1:{port}", 3 * 2**20)


def test_an_engine_can_be_set_up_again_after_its_end_fake_server(start, connect, batch, llama, make_tokenizer):
    engine = connect(start())
    first = draw(engine, batch)
    engine.close()
    with pytest.raises(RuntimeError, match="setup"):
        draw(engine, batch)
    engine.setup(llama, make_tokenizer())
    with pytest.raises(RuntimeError, match="update_weights"):
        draw(engine, batch)
    engine.update_weights(0)
    assert torch.equal(draw(engine, batch).response_ids, first.response_ids)


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_run_whose_servers_are_gone_says_where_to_go_on_fake_server(start, tiny_run, tmp_path, monkeypatch, capsys):
    def dies_in_the_second_iteration(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        # Weights are sent before the held-out prompts, before training, and after the first iteration.
        if server.calls.count("rlhf_receive") == 3:
            server.kill()

    server = start(vocabulary=17, fault=dies_in_the_second_iteration)
    settings = [
        "rollout=vllm_server",
        f"rollout.urls=['{server.url}']",
        "rollout.retries=1",
        "rollout.retry_seconds=0.01",
    ]
    settings += ["iterations=3", "logger=none", "callbacks.calibrate=null", "callbacks.checkpoint.every_n_iterations=1"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert cli.main(["train", "hydra.run.dir=run", *tiny_run, *settings]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said and f"no rollout server is left. {server.url}" in said
    assert f"resume={tmp_path / 'run'} goes on from iteration_000001.ckpt" in said
    assert latest_valid(tmp_path / "run" / "checkpoints").name == "iteration_000001.ckpt"


def test_an_evaluation_without_servers_is_one_screen_fake_server(capsys, monkeypatch):
    def evaluate(*_: Any) -> None:
        raise ServersGone("no rollout server is left. http://a:1: refused")

    monkeypatch.setattr("lightning_rlhf.evaluate.evaluate_checkpoint", evaluate)
    assert cli.main(["eval", "checkpoint=run"]) == 1
    assert capsys.readouterr().err.startswith("no rollout server is left. http://a:1: refused\n(full traceback")


# --- several processes of one run ------------------------------------------------------------------------------------


@pytest.fixture
def two_ranks(start, connect) -> Callable[..., tuple[FakeVLLMServer, VLLMServerEngine, VLLMServerEngine]]:
    """A server, and two engines that know the same weights under the same label, as two ranks do."""

    def _two_ranks() -> tuple[FakeVLLMServer, VLLMServerEngine, VLLMServerEngine]:
        server = start()
        second, first = connect(server), connect(server)
        second._label, second._source = first._label, first._source
        server.calls.clear()
        return server, first, second

    return _two_ranks


def test_weights_that_another_rank_has_brought_back_are_not_sent_again_fake_server(two_ranks, batch):
    server, first, second = two_ranks()
    server.held, server.label = "", "default"  # restarted
    received = len(server.received)
    first._pool.bring_up(first._make_ready)
    assert len(server.received) == received + 1
    server.calls.clear()
    second._pool.bring_up(second._make_ready)
    assert server.calls == ["rlhf_describe", "rlhf_held", "/weight_info", "/resume"], "nothing was paused"
    assert_complete(draw(second, batch), batch)


@pytest.mark.parametrize("spoilt", ["held", "label"])
def test_a_transfer_that_was_not_completed_is_made_again_fake_server(two_ranks, spoilt):
    server, first, _ = two_ranks()
    setattr(server, spoilt, "a mixture")
    first._pool.bring_up(first._make_ready)
    assert "/pause" in server.calls and server.held == server.label == first._label and first._pool.ready


def test_two_ranks_that_bring_a_server_back_at_once_fake_server(two_ranks, batch):
    server, first, second = two_ranks()
    server.held, server.label = "", "default"
    received, both = len(server.received), Barrier(2)
    receive = server.rlhf_receive

    def meet(**arguments: Any) -> dict[str, Any]:
        both.wait(30)
        return receive(**arguments)

    server.rlhf_receive = meet
    other = Thread(target=second._pool.bring_up, args=[second._make_ready])
    other.start()
    first._pool.bring_up(first._make_ready)
    other.join()
    assert len(server.received) == received + 1, "the second transfer writes nothing into weights that are in use"
    for engine in (first, second):
        assert engine._pool.causes() == ""
        assert_complete(draw(engine, batch), batch)


def test_the_worker_writes_weights_once_and_again_after_a_failure(monkeypatch):
    written: list[str] = []

    def receive(worker: Any, weights: Any) -> Receipt:
        if not weights:
            raise RuntimeError("incomplete")
        written.append(weights)
        return Receipt(sent=1, parameters=1)

    monkeypatch.setattr(vllm_worker, "fetch", lambda source, token, label: label.removeprefix("broken"))
    monkeypatch.setattr(vllm_worker, "receive", receive)
    worker = vllm_worker.WeightReceiver()
    assert worker.rlhf_held() == {"label": ""}
    source = "http://127.0.0.1:7000"
    answers = [worker.rlhf_receive(source, "token", label) for label in ("a", "a", "b", "broken", "b")]
    assert [answer.get("label") for answer in answers] == ["a", "a", "b", None, "b"]
    assert "incomplete" in answers[3]["error"]
    assert written == ["a", "b", "b"] and worker.rlhf_held() == {"label": "b"}


def test_each_rank_begins_with_another_server_and_has_its_part_of_the_requests_fake_server(start, connect):
    servers = [start() for _ in range(3)]
    pool = connect(*servers, requests_per_server=8)._pool
    parts = []
    for rank in range(3):
        pool.share(rank, 3)
        parts.append(pool.at_a_time)
        assert pool.ready[0].server.url == servers[rank].url and len(pool.ready) == 3
    assert parts == [3, 3, 2]
