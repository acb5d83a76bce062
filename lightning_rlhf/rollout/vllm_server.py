"""Generation by vLLM servers in other processes or on other machines."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from threading import RLock
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_rlhf.bounds import bounded
from lightning_rlhf.distributed.processes import gather_objects, place, together
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.rollout.assemble import Generated, assemble_rollout, row_seeds
from lightning_rlhf.rollout.base import BaseEngine, Sampling
from lightning_rlhf.rollout.binding import Binding, announce, bind, check_prompts, unwrapped
from lightning_rlhf.rollout.server_client import START, Server, ServerMismatch
from lightning_rlhf.rollout.server_pool import Row, ServerPool
from lightning_rlhf.rollout.token_check import read_token
from lightning_rlhf.rollout.weight_offer import WeightStore
from lightning_rlhf.rollout.weights import named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class VLLMServerEngine(BaseEngine):
    """Generation spread over vLLM servers, which fetch the trainer's weights after every update.

    A row's tokens are a function of its prompt, the weights and its own seed: which server draws it does not matter (up
    to floating-point rounding, which depends on what else the server computes at that moment). Token ids travel, never
    text. A server that dies or fails is dropped and its unfinished requests are sent to others; it is checked again and
    again, and used once it holds the current weights. Calls are serialised, so any thread may make them.

    With several training processes each generates for its own prompts on all servers, independently. Rank 0 offers the
    weights and makes the servers load them; any rank may do the latter for a server that returns.

    Args:
        urls: addresses of the servers, ``http://host:port``.
        requests_per_server: responses that one server works on at a time, of all training processes together.
        request_timeout: seconds for one response and for one transfer of the weights.
        retries: how often to check for a server when none is left, and how often to request one response again.
        retry_seconds: between two checks of a dropped server; doubled each time while none is left.
        token_file: file with the token that the servers ask for, readable by its owner alone; ``None``: the
            environment gives it (:func:`~lightning_rlhf.rollout.token_check.read_token`), or the servers ask for none.
        weights_host: address of rank 0's machine that the servers can reach; weights are offered there.
        weights_port: port for it; 0 takes a free one.
        weights_part_mib: weights travel in parts of about this size.
        shared: settings of sampling, end tokens and ``lag``, see :class:`~lightning_rlhf.rollout.base.BaseEngine`.

    Raises:
        ValueError: a setting is not allowed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        requests_per_server: int = 64,
        request_timeout: float = 600.0,
        retries: int = 6,
        retry_seconds: float = 2.0,
        token_file: str | None = None,
        weights_host: str = "127.0.0.1",
        weights_port: int = 0,
        weights_part_mib: int = 256,
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        if isinstance(urls, str) or not urls or len(set(urls)) < len(urls):
            raise SettingError("rollout.urls", urls, "a list of different addresses as http://host:port")
        bounded("rollout", at_least=1, whole=True, requests_per_server=requests_per_server)
        bounded("rollout", at_least=1, whole=True, weights_part_mib=weights_part_mib)
        bounded("rollout", at_least=0, whole=True, retries=retries, weights_port=weights_port)
        bounded("rollout", above=0, request_timeout=request_timeout, retry_seconds=retry_seconds)
        self._address, self._part_bytes = (weights_host, weights_port), weights_part_mib * 2**20
        token = read_token(token_file)
        self._pool = ServerPool(
            [Server(url, request_timeout=request_timeout, token=token) for url in urls],
            per_server=requests_per_server,
            retries=retries,
            retry_seconds=retry_seconds,
        )
        self._settings = {
            "request_timeout": request_timeout,
            "weights_part_mib": weights_part_mib,
            "authenticated": token is not None,
        }
        # Labels of weights name the run, as another run counts its versions from 0, too.
        self._run, self._transfers, self._label = secrets.token_hex(4), 0, ""
        self._source = ("", "")  # of the weights: address and token
        self._longest = 0
        self._binding: Binding | None = None
        self._lm: PreTrainedModel | None = None
        self._store: WeightStore | None = None
        self._lock = RLock()

    # --- the protocol of engines -------------------------------------------------------------------------------------

    def setup(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Bind model and tokenizer, and check the servers; see :meth:`RolloutEngine.setup`.

        Raises:
            ValueError: a server runs another model, or reports log-probabilities of another distribution; or there
                are more training processes than a server may have requests.
            ServersGone: a process can reach none of the servers.
        """
        rank, world = place()
        if self._pool.per_server < world:
            allowed = f"at least {world}, one for each training process"
            raise SettingError("rollout.requests_per_server", self._pool.per_server, allowed)
        with self._lock:
            self._lm, self._binding, self._label = lm, bind(lm, tokenizer, self.stop_token_ids), ""
            self._pool.share(rank, world)
            together(self._meet_servers)
            own = ("", "") if self._store is None else (self._store.url, self._store.token)
            self._run, self._source = gather_objects((self._run, own))[0]
            announce(self._binding, self.sampling, ignore_eos=self.ignore_eos)

    def update_weights(self, version: int) -> None:
        """Make all servers load the trainer's weights, in parallel; one that fails gets no requests until it succeeds.

        All ranks take part in gathering sharded weights; rank 0 sends them.

        Raises:
            Exception: rank 0 could not copy the weights.
        """
        with self._lock:
            self._bound()
            assert self._lm is not None
            together(partial(self._pool.finish_probes, wait=True))  # no probe may read the copy that is replaced
            self.policy_version = version
            self._transfers += 1
            self._label = f"{self._run}-{self._transfers}"
            together(partial(self._send, named_weights(unwrapped(self._lm))))
            self._pool.adopt(gather_objects(self._pool.status())[0])

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        """Draw ``samples`` responses to each prompt; see :meth:`RolloutEngine.generate`.

        Returns:
            A rollout on the CPU; R is the length of its longest response. Log-probabilities of greedy tokens are
            those of the full distribution at temperature 1.

        Raises:
            ValueError: no prompt, an empty prompt, or prompt and response exceed the positions of model or server.
            ServersGone: no server was left, and none returned in time.
            RequestRefused: a server says that a request is wrong.
        """
        with self._lock:
            binding = self._bound()
            if not self._label:
                raise RuntimeError("VLLMServerEngine.update_weights(version) comes before anything is generated")
            self._pool.require(self._make_ready)
            check_prompts(prompts, max_new_tokens, self.positions)
            self._longest = max(map(len, prompts.ids)) + max_new_tokens
            sampling = replace(self.sampling, samples=samples, max_new_tokens=max_new_tokens, greedy=greedy)
            seeds = row_seeds(prompts, samples, seed)
            requests = self._requests(prompts, sampling, seeds, binding)
            rows = [
                Row(index, index // samples, len(request["token_ids"]) + max_new_tokens)
                for index, request in enumerate(requests)
            ]
            label, version = self._label, self.policy_version

            def draw(server: Server, row: Row) -> Generated:
                body = requests[row.index] | {"request_id": f"{label}-{row.index}-{secrets.token_hex(4)}"}
                return server.generate(body, label=label, version=version)

            responses = self._pool.run(rows, draw, self._make_ready)
            return assemble_rollout(prompts, responses, seeds, pad_id=binding.pad_id)

    def describe(self) -> dict[str, Any]:
        """Every current setting, as plain values, and the facts that each server reports."""
        binding = self._bound()
        facts = [member.server.facts for member in self._pool.members if member.server.facts]
        return self.described(
            "vllm_server",
            binding,
            requests_per_server=self._pool.per_server,
            retries=self._pool.retries,
            retry_seconds=self._pool.retry_seconds,
            **self._settings,
            weights_from=self._source[0],
            # The lowest precision, if servers differ.
            dtype=next((f["dtype"] for f in facts if f["dtype"] != "float32"), "float32"),
            quantization=next((f["quantization"] for f in facts if f["quantization"] is not None), None),
            servers={member.server.url: dict(member.server.facts) for member in self._pool.members},
        )

    def close(self) -> None:
        """Abort running requests and stop offering weights; servers keep running, :meth:`setup` may be called again."""
        self._pool.close()
        if self._store is not None:
            self._store.close()
        self._store = self._binding = self._lm = None

    # --- servers -----------------------------------------------------------------------------------------------------

    def _meet_servers(self) -> None:
        """Verify the servers on every rank, as ranks may be on other machines; rank 0 opens its weight store."""
        self._pool.bring_up(self._verify)
        for member in self._pool.members:
            if isinstance(member.error, ServerMismatch):
                raise ValueError(f"rollout.urls: {member.error}")
        self._pool.require(self._verify)
        if self._store is None and place()[0] == 0:
            self._store = self._open_store()

    def _verify(self, server: Server) -> None:
        """Refuse a server with another model, other log-probabilities or too short sequences."""
        facts, vocabulary = server.describe(), self._bound().vocabulary
        if facts["vocabulary"] != vocabulary:
            raise ServerMismatch(
                f"{server.url} runs {facts['model']} with a vocabulary of {facts['vocabulary']}, the trainer's model "
                f"has {vocabulary}: it is another model"
            )
        if facts["logprobs_mode"] != "processed_logprobs":
            raise ServerMismatch(
                f"{server.url} reports {facts['logprobs_mode']}, which leave out temperature and top-p, where "
                f"processed_logprobs are needed; {START}"
            )
        if facts["max_model_len"] < self._longest:
            raise ServerMismatch(
                f"{server.url} takes sequences of {facts['max_model_len']} tokens, this batch has {self._longest}; "
                "start it with a larger max_model_len"
            )

    def _send(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Offer the weights and make all servers load them; the other ranks only take part in gathering."""
        try:
            if self._store is not None:
                self._store.publish(self._label, weights)
        finally:
            for _ in weights:  # even if the copy failed, all ranks have to gather every tensor
                continue
        if self._store is not None:
            self._pool.bring_up(self._bring_weights)

    def _bring_weights(self, server: Server) -> None:
        self._verify(server)
        server.take_weights(*self._source, self._label)

    def _make_ready(self, server: Server) -> None:
        """Verify a dropped server and send it the current weights, unless another rank has done so."""
        self._verify(server)
        if server.holds(self._label):
            server.resume()
        else:
            server.take_weights(*self._source, self._label)

    def _open_store(self) -> WeightStore:
        host, port = self._address
        try:
            return WeightStore(host, port, self._part_bytes)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"rollout.weights_host = {host!r}, rollout.weights_port = {port}: cannot be listened on ({error}); "
                "allowed are an address of this machine and a free port, or 0"
            ) from error

    # --- requests ----------------------------------------------------------------------------------------------------

    @property
    def positions(self) -> int | None:
        """Longest sequence, prompt and response, that every server takes."""
        lengths = [member.server.facts["max_model_len"] for member in self._pool.ready]
        return min([length for length in (self._bound().max_positions, *lengths) if length is not None], default=None)

    def _requests(
        self, prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int], binding: Binding
    ) -> list[dict[str, Any]]:
        """Bodies of ``/inference/v1/generate``, one for each row; the rows of a prompt are adjacent."""
        shared = {
            "temperature": 0.0 if sampling.greedy else sampling.temperature,
            "top_k": 0 if sampling.greedy else sampling.top_k,
            "top_p": 1.0 if sampling.greedy else sampling.top_p,
            "max_tokens": sampling.max_new_tokens,
            "logprobs": 0,  # of the sampled token only
            "ignore_eos": True,  # the server's own end tokens; ours follow
            "stop_token_ids": self.ends(binding),
            "detokenize": False,
        }
        rows = [ids for ids in prompts.ids for _ in range(sampling.samples)]
        return [
            {"token_ids": list(ids), "sampling_params": {**shared, "seed": seed}}
            for ids, seed in zip(rows, seeds, strict=True)
        ]

    def _bound(self) -> Binding:
        if self._binding is None:
            raise RuntimeError("VLLMServerEngine.setup(lm, tokenizer) comes before any other call")
        return self._binding
