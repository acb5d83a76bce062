"""The trainer's side of a weight transfer by HTTP."""

from __future__ import annotations

import copy
import http.client

import torch

from lightning_rlhf.rollout.weight_offer import WeightStore, in_parts


def test_weights_are_cut_into_parts_and_put_together_again():
    weights = [(f"w{i}", torch.full((size,), float(i))) for i, size in enumerate((10, 10, 30, 5, 1))]
    parts = [list(part) for part in in_parts(iter(weights), size=80)]
    assert parts == [["w0", "w1"], ["w2"], ["w3", "w4"]], (
        "80 bytes are 20 numbers; a larger tensor is a part of its own"
    )
    transposed = torch.arange(6.0).reshape(2, 3).T
    [part] = in_parts([("t", transposed)], size=80)
    assert part["t"].is_contiguous() and torch.equal(part["t"], transposed)


def test_the_store_answers_only_to_its_token_and_label():
    store = WeightStore(part_bytes=100)
    store.publish("run-1", [("w", torch.ones(3))])

    def ask(path: str, token: str | None = None, method: str = "GET") -> int:
        connection = http.client.HTTPConnection(store.url.removeprefix("http://"))
        shown = f"Bearer {store.token if token is None else token}"
        connection.request(method, path, headers={"Authorization": shown} if shown != "Bearer " else {})
        return connection.getresponse().status

    assert [ask(path) for path in ("/manifest", "/run-1/0", "/run-1/1", "/run-0/0", "/run-1/-1", "/")] == [
        *(200, 200, 404, 404, 404, 404)
    ]
    assert {ask(path, guess) for path in ("/manifest", "/run-1/0", "/") for guess in ("guess", "")} == {401}
    odd = ("/../run-1/0", "/run-1/../run-1/0", "/run%2D1/0", "/run-1/00", "/run-1/" + "9" * 5000)
    assert {ask(path) for path in odd} == {404}
    assert {ask("/run-1/0", method=method) for method in ("POST", "HEAD", "PUT", "OPTIONS")} == {501}
    snapshot = copy.copy(store._parts)
    store.publish("run-2", [("w", torch.zeros(3))])
    assert ask("/run-1/0") == 404 and store._parts != snapshot
    store.close()
