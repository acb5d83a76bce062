"""Several training processes on vLLM servers: real processes (gloo), and fake servers in the process of the test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_rlhf.distributed.processes import together
from lightning_rlhf.models import build_tiny
from tests.distributed.server_ranks import draw_once, send_sharded, set_up, train_on_servers
from tests.ranks import run_ranks
from tests.rollout.fake_vllm_server import FakeVLLMServer, slow
from tests.support import VOCABULARY


class ScoringFake(FakeVLLMServer):
    """Its tokens follow from the seed, their log-probabilities from the weights it was sent."""

    def __init__(self, **options: Any) -> None:
        loaded = build_tiny(VOCABULARY, hidden_size=32, layers=2, heads=2, max_positions=64, seed=9)
        self.lm = loaded.lm.eval()
        super().__init__(**({"vocabulary": self.lm.config.vocab_size} | options))

    def weights_changed(self) -> None:
        missing, unexpected = self.lm.load_state_dict(self.weights, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)

    def right_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        answer = super().right_answer(body)
        choice = answer["choices"][0]
        prompt, ids = body["token_ids"], choice["token_ids"]
        with self.receiving, torch.no_grad():
            logits = self.lm(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.float().log_softmax(-1)
        choice["logprobs"]["content"] = [
            {"token_id": token, "logprob": float(logprobs[i, token])} for i, token in enumerate(ids)
        ]
        return answer


@pytest.fixture
def start() -> Iterator[Callable[..., FakeVLLMServer]]:
    servers = []

    def _start(cls: type[FakeVLLMServer] = ScoringFake, **options: Any) -> FakeVLLMServer:
        servers.append(cls(**options))
        return servers[-1]

    yield _start
    for server in servers:
        server.kill()


def asked(servers: list[FakeVLLMServer]) -> Counter[int]:
    """How often each row was requested, by its seed."""
    return Counter(request["sampling_params"]["seed"] for server in servers for request in server.requests)


def train(*servers: FakeVLLMServer, folder: Path, validate: bool = False, **engine: Any) -> list[dict[str, Any]]:
    """Both ranks of a training, which came to its end."""
    ranks = run_ranks(train_on_servers, [server.url for server in servers], engine, validate, folder=folder)
    assert not any("error" in rank for rank in ranks), ranks
    return ranks


def drawn(ranks: list[dict[str, Any]]) -> list[int]:
    return [seed for rank in ranks for seeds in rank["seeds"] for seed in seeds]


# --- trainings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_two_ranks_train_on_two_servers_fake_server(start, tmp_path: Path, lag: int) -> None:
    servers = [start(), start()]
    ranks = train(*servers, folder=tmp_path, lag=lag)
    size = sum(weight.nbytes for weight in ranks[0]["weights"].values())
    for server in servers:
        assert server.received == [size] * 4, "once before the first iteration, and once after each of three"
    assert len(drawn(ranks)) == 3 * 8 * 2 and asked(servers) == Counter(drawn(ranks)), "each row once"
    for rank in ranks:
        assert rank["label"] == servers[0].held == servers[1].held
        assert rank["versions"] == ([[0], [1], [2]] if lag == 0 else [[0], [0], [1]])
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, servers[0].weights[name]) and torch.equal(weight, servers[1].weights[name])
    first, *later = [row["rollout/logprob_abs_diff_max"] for row in ranks[0]["curve"]]
    if lag == 0:
        assert max(first, *later) <= 1e-4
    else:
        assert first <= 1e-4 < min(later), "from the second iteration on, samples are one update old"


def test_evaluations_around_a_training_get_their_weights_fake_server(start, tmp_path: Path) -> None:
    server = start()
    ranks = train(server, folder=tmp_path, validate=True)
    assert len(server.received) == 1 + 4 + 1
    assert ranks[0]["held_out"] == ranks[1]["held_out"] and len(ranks[0]["held_out"]) == 2


def test_a_server_dies_and_returns_while_two_ranks_train_fake_server(start, tmp_path: Path) -> None:
    returned: list[FakeVLLMServer] = []

    def die(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        if len(server.requests) == 12:
            server.kill()

    def restart(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        slow(0.02)(server, body)
        with server.lock:
            if not returned and len(server.requests) >= 20:
                returned.append(start(port=dying.port))

    dying, other = start(fault=die), start(fault=restart)
    ranks = train(dying, other, folder=tmp_path, requests_per_server=4)
    [back] = returned
    assert back.calls.index("rlhf_receive") < back.calls.index("generate") and len(back.requests) > 0
    assert set(back.sampled_with) <= set(other.sampled_with), "by the weights that the other server had, and no others"
    assert set(asked([dying, other, back])) == set(drawn(ranks)) and len(set(drawn(ranks))) == 3 * 8 * 2
    for rank in ranks:
        assert max(row["rollout/logprob_abs_diff_max"] for row in rank["curve"]) <= 1e-4
        for name, weight in rank["weights"].items():
            assert torch.equal(weight, back.weights[name]) and torch.equal(weight, other.weights[name])


@pytest.mark.parametrize("lag", [0, 1])
def test_all_servers_gone_is_the_same_error_on_both_ranks_fake_server(start, tmp_path: Path, lag: int) -> None:
    def die(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        # The last row of the second iteration: one rank waits for it, the other has all its rows.
        if len(server.requests) == 2 * 8 * 2:
            slow(0.5)(server, body)
            server.kill()

    server = start(fault=die)
    ranks = run_ranks(
        train_on_servers, [server.url], {"retries": 2, "requests_per_server": 2, "lag": lag}, folder=tmp_path
    )
    for rank in ranks:
        assert rank["error"] == ranks[0]["error"] and rank["iteration"] == 2 - lag
        assert rank["error"].startswith("ServersGone: no rollout server is left.") and server.url in rank["error"]


# --- the engine ------------------------------------------------------------------------------------------------------


def test_the_limit_of_requests_is_of_all_ranks_together_fake_server(start, tmp_path: Path) -> None:
    running: Counter[str] = Counter()
    most: Counter[str] = Counter()

    def count(server: FakeVLLMServer, body: dict[str, Any]) -> None:
        with server.lock:
            running[server.url] += 1
            most[server.url] = max(most[server.url], running[server.url])
        slow(0.05)(server, body)
        with server.lock:
            running[server.url] -= 1

    servers = [start(FakeVLLMServer, fault=count) for _ in range(2)]
    urls = [server.url for server in servers]
    ranks = run_ranks(draw_once, urls, {"requests_per_server": 3}, folder=tmp_path)
    assert asked(servers) == Counter(ranks[0] + ranks[1]) and len(asked(servers)) == 2 * 6 * 2
    assert max(most.values()) == 3


SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another model": ({"vocabulary": 51}, {}, "ValueError: rollout.urls: .*a vocabulary of 51"),
    "fewer requests than ranks": (
        {},
        {"requests_per_server": 1},
        "SettingError: rollout.requests_per_server = 1 is not allowed: at least 2, one for each training process",
    ),
    "no such address": ({}, {"weights_host": "192.0.2.1"}, "ValueError: rollout.weights_host = '192.0.2.1'"),
}


@pytest.mark.parametrize(("facts", "settings", "message"), SETUPS.values(), ids=SETUPS)
def test_a_setup_that_fails_fails_on_both_ranks_fake_server(start, tmp_path: Path, facts, settings, message) -> None:
    server = start(FakeVLLMServer, **facts)
    errors = run_ranks(set_up, [server.url], settings, folder=tmp_path)
    assert errors[0] == errors[1]
    assert re.match(message, errors[0])


@pytest.mark.parametrize("broken", [False, True])
def test_sharded_weights_are_gathered_by_all_ranks_and_sent_once_fake_server(
    start, tmp_path: Path, broken: bool
) -> None:
    server = start(FakeVLLMServer)
    results = run_ranks(send_sharded, [server.url], broken, folder=tmp_path)
    if broken:
        assert results == ["no room for a copy"] * 2 and server.received == []
        return
    assert len(server.received) == 1
    for expected in results:
        assert server.weights.keys() == expected.keys()
        assert all(torch.equal(server.weights[name], weight) for name, weight in expected.items())


# --- errors ----------------------------------------------------------------------------------------------------------


class Stubborn(Exception):
    """An error that cannot be unpickled."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


def fails_on(rank: int, failing: list[int]) -> str:
    def work() -> str:
        if rank in failing:
            raise Stubborn(rank, -1)
        return f"rank {rank}"

    try:
        return together(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    for failing, expected in {
        (): ["rank 0", "rank 1"],
        (1,): ["RuntimeError: Stubborn: 1 is not -1", "Stubborn: 1 is not -1"],
        (0, 1): ["Stubborn: 0 is not -1", "RuntimeError: Stubborn: 0 is not -1"],
    }.items():
        folder = tmp_path / str(len(failing)) / "_".join(map(str, failing))
        folder.mkdir(parents=True)
        assert run_ranks(fails_on, list(failing), folder=folder) == expected
    with pytest.raises(Stubborn):
        together(lambda: (_ for _ in ()).throw(Stubborn(1, 2)))
