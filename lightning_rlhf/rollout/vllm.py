"""vLLM inside the training process: the same weights, sent after every update and never written to disk."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_rlhf.accelerators.device import current, generators_kept
from lightning_rlhf.bounds import bounded
from lightning_rlhf.errors import SettingError
from lightning_rlhf.experience import PromptBatch, Rollout
from lightning_rlhf.functional.choices import EngineDType
from lightning_rlhf.rollout.assemble import Generated, assemble_rollout, row_seeds
from lightning_rlhf.rollout.base import BaseEngine, Sampling
from lightning_rlhf.rollout.binding import Binding, announce, bind, check_prompts, unwrapped
from lightning_rlhf.rollout.vllm_package import ASCEND_DEFAULTS, platform, quiet, require_vllm
from lightning_rlhf.rollout.weight_receiver import receive
from lightning_rlhf.rollout.weights import WEIGHT_BITS, named_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase
    from vllm import LLM, SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_CACHE_GIB = 1.0
"""Key-value cache on a CPU if none is asked for; vLLM's own default is a share of all memory."""
OWN_ARGUMENTS = frozenset(
    {"model", "tokenizer", "skip_tokenizer_init", "load_format", "logprobs_mode", "generation_config"}
)
"""Arguments of ``vllm.LLM`` that this engine decides, because its log-probabilities or weights depend on them."""


class VLLMEngine(BaseEngine):
    """Generation with a vLLM engine that lives in the training process and has a copy of the weights.

    vLLM takes the architecture from the trainer's model in memory, starts with random weights and is then sent the
    real ones, by name, LoRA merged. Every transfer is counted on the receiving side: unless each parameter of vLLM's
    model was written exactly once, it fails and nothing can be generated until a transfer succeeds.

    A row's tokens are drawn from its own seed, as with :class:`HFEngine`, but by vLLM's generator, so the two engines
    draw different samples. vLLM's rounding depends on the other rows of the batch. Sampling options of the checkpoint's
    generation config are not applied. Greedy responses come with their log-probability at temperature 1.

    Args:
        dtype: of vLLM's weights and arithmetic: ``auto`` (the trainer's), ``float32``, ``bfloat16``, ``float16``.
        quantization: of vLLM, such as ``fp8``; ``None`` for none.
        weight_bits: the linear layers' weights that vLLM receives are rounded to 8 or 4 bits per output channel, to
            study the mismatch of quantised rollouts where no kernel for them exists; ``None`` sends them as they are.
        gpu_memory_utilization: share of the device's memory that vLLM may use, cache included.
        kv_cache_gib: size of the key-value cache in GiB; ``None``: what the share leaves (on a CPU 1 GiB).
        max_model_len: longest sequence, prompt and response; ``None``: what the model was built for.
        tensor_parallel_size: devices over which vLLM splits the model. With more than one, the workers are processes
            of their own and weights travel through host memory.
        enforce_eager: no compilation and no CUDA graphs; ``None``: only on a CPU, where compiling takes minutes.
        sleep: give the memory of weights and cache back to the trainer between generations (GPU and NPU).
        engine_args: further arguments of ``vllm.LLM``.
        shared: settings of sampling, end tokens and ``lag``, see :class:`~lightning_rlhf.rollout.base.BaseEngine`.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: a setting is not allowed.
    """

    _llm: LLM | None
    _lm: PreTrainedModel | None
    """The trainer's model, where weights come from."""
    _binding: Binding | None
    _resolved: dict[str, Any]
    """Arguments given to ``vllm.LLM``."""
    _half_sent: bool
    """A transfer began and did not succeed."""
    _asleep: bool
    _owns_process_group: bool
    """``torch.distributed`` was set up by vLLM and ends with it."""

    def __init__(
        self,
        *,
        dtype: EngineDType = "auto",
        quantization: str | None = None,
        weight_bits: int | None = None,
        gpu_memory_utilization: float = 0.4,
        kv_cache_gib: float | None = None,
        max_model_len: int | None = None,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        sleep: bool = False,
        engine_args: Mapping[str, Any] = {},
        **shared: Any,
    ) -> None:
        super().__init__(**shared)
        self.dtype, self.quantization, self.weight_bits = dtype, quantization, weight_bits
        self.gpu_memory_utilization, self.kv_cache_gib = gpu_memory_utilization, kv_cache_gib
        self.max_model_len, self.tensor_parallel_size = max_model_len, tensor_parallel_size
        self.enforce_eager, self.sleep = enforce_eager, sleep
        self.engine_args = dict(engine_args or {})
        self._check_settings()
        require_vllm()
        self._forget()

    def _check_settings(self) -> None:
        def refuse(key: str, allowed: str) -> None:
            raise SettingError(f"rollout.{key}", getattr(self, key), allowed)

        if self.dtype not in DTYPES:
            refuse("dtype", f"one of {', '.join(DTYPES)}")
        if self.weight_bits not in (None, *WEIGHT_BITS):
            refuse("weight_bits", f"one of {', '.join(map(str, WEIGHT_BITS))}, or null")
        if self.weight_bits is not None and self.quantization is not None:
            refuse("weight_bits", "null beside rollout.quantization: one rounding at a time")
        bounded("rollout", above=0, at_most=1, gpu_memory_utilization=self.gpu_memory_utilization)
        bounded("rollout", above=0, optional=True, kv_cache_gib=self.kv_cache_gib)
        bounded("rollout", above=1, whole=True, optional=True, max_model_len=self.max_model_len)
        bounded("rollout", at_least=1, whole=True, tensor_parallel_size=self.tensor_parallel_size)
        if own := sorted(OWN_ARGUMENTS & self.engine_args.keys()):
            refuse("engine_args", f"{own[0]} is decided by the engine")

    # --- the engine ----------------------------------------------------------------------------------------------

    def setup(self, lm: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Build vLLM for the model's architecture, and send the weights.

        A later call with the same model only sends the weights again. Random state, number of threads and
        ``torch.set_num_threads``, which vLLM replaces on a CPU, are restored.

        Raises:
            ValueError: a setting does not fit the model or the machine.
            RuntimeError: the weights do not fit vLLM's model of this architecture.
        """
        if self._llm is not None and self._lm is not lm:
            self.close()
        if self._llm is None:
            self._check_place()
            self._binding = bind(lm, tokenizer, self.stop_token_ids)
            self._resolved = self._arguments(lm)
            self._build(lm)
            announce(self._binding, self.sampling, ignore_eos=self.ignore_eos)
        self.update_weights(self.policy_version)

    def _check_place(self) -> None:
        current_platform = platform()
        if self.sleep and not current_platform.is_sleep_mode_available():
            raise ValueError(
                f"rollout.sleep = True is not allowed: vLLM can give back the memory of a GPU or NPU only, and runs on "
                f"{current_platform.device_type or 'nothing'} here"
            )
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                "rollout=vllm runs in one training process; with several use rollout=vllm_server or rollout=hf"
            )

    def _arguments(self, lm: PreTrainedModel) -> dict[str, Any]:
        """Arguments of ``vllm.LLM``, all but the folder of the model's configuration."""
        kind = platform().device_type
        on_cpu = kind == "cpu"
        cache = CPU_CACHE_GIB if self.kv_cache_gib is None and on_cpu else self.kv_cache_gib
        arguments = {
            "dtype": str(unwrapped(lm).dtype).removeprefix("torch.") if self.dtype == "auto" else self.dtype,
            "quantization": self.quantization,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "max_model_len": self.max_model_len,
            "tensor_parallel_size": self.tensor_parallel_size,
            "enforce_eager": on_cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_sleep_mode": self.sleep,
            "seed": 0,  # rows have their own
        }
        if cache is not None:
            arguments["kv_cache_memory_bytes"] = int(cache * 2**30)
        if kind == "npu":
            arguments["additional_config"] = ASCEND_DEFAULTS
        own = {
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
        }
        return arguments | self.engine_args | own

    def _build(self, lm: PreTrainedModel) -> None:
        inner = unwrapped(lm)
        config = copy.deepcopy(inner.config)
        config.architectures = [type(inner).__name__]
        # Runs the engine core in this process, so that weights are not copied through a pipe.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
        self._owns_process_group = not torch.distributed.is_initialized()
        with tempfile.TemporaryDirectory() as folder, isolate_rng(), generators_kept(), quiet():
            config.save_pretrained(folder)
            try:
                from vllm import LLM

                self._llm = LLM(model=folder, **self._resolved)
            finally:
                torch.set_num_threads = set_num_threads
                torch.set_num_threads(threads)
        self._lm = lm
        self._try_out(type(inner).__name__)

    def _try_out(self, architecture: str) -> None:
        """Generate one token: a missing kernel shows only when vLLM runs."""
        llm, binding, _ = self._require_setup()
        prompt: list[Any] = [{"prompt_token_ids": [0]}]
        one = self._sampling_params(replace(self.sampling, max_new_tokens=1), 0, binding)
        try:
            with quiet(), generators_kept():
                llm.generate(prompt, one, use_tqdm=False)
        except RuntimeError as error:
            self.close()
            raise ValueError(
                f"rollout=vllm cannot run this {architecture} here: {error}. On a CPU the size of an attention head "
                f"(hidden size / heads) must be one that vLLM knows, such as 32, 64 or 128."
            ) from error

    def update_weights(self, version: int) -> None:
        """Send the trainer's weights; the prefix cache is dropped once all have arrived.

        Raises:
            RuntimeError: a parameter of vLLM's model was not written exactly once.
        """
        llm, _, lm = self._require_setup()
        self._half_sent = True
        self._wake()
        weights: Iterable[Any] = named_weights(unwrapped(lm), bits=self.weight_bits)
        if self.tensor_parallel_size > 1:
            weights = [(name, tensor.cpu()) for name, tensor in weights]
        with quiet():
            for receipt in llm.collective_rpc(receive, args=(weights,)):
                receipt.check()
        if not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache after new weights arrived: requests are running")
        self._half_sent = False
        self.policy_version = version

    def generate(
        self, prompts: PromptBatch, *, samples: int, max_new_tokens: int, seed: int, greedy: bool = False
    ) -> Rollout:
        """Draw ``samples`` responses to each prompt; see :meth:`RolloutEngine.generate`.

        May be called from another thread than the one that trains, as long as no weights are sent meanwhile.

        Returns:
            A rollout on the CPU; R is the length of its longest response.

        Raises:
            ValueError: no prompt, an empty prompt, or prompt and response exceed the model's positions.
            RuntimeError: the last weight transfer failed, or vLLM returned an incomplete response or no
                log-probabilities.
        """
        llm, binding, _ = self._require_setup()
        if self._half_sent:
            raise RuntimeError("the weights in vLLM are half sent: the last transfer failed; send them again")
        sampling = replace(self.sampling, samples=samples, max_new_tokens=max_new_tokens, greedy=greedy)
        check_prompts(prompts, max_new_tokens, self.positions)
        seeds = row_seeds(prompts, samples, seed)
        rows = prompts.repeat(samples)
        requests: list[Any] = [{"prompt_token_ids": ids} for ids in rows.ids]
        self._wake()
        # PyTorch sets OpenMP's number of threads for each calling thread, at its first operation; vLLM's attention on a
        # CPU reads the number before and refuses to run if it changes.
        torch.set_num_threads(torch.get_num_threads())
        with quiet(), generators_kept(), torch.autocast(current().type, enabled=False):
            outputs = llm.generate(
                requests,
                [self._sampling_params(sampling, row_seed, binding) for row_seed in seeds],
                use_tqdm=False,
            )
        if self.sleep:
            llm.sleep(level=1)
            self._asleep = True
        responses = [_generated(output.outputs[0], self.policy_version) for output in outputs]
        return assemble_rollout(prompts, responses, seeds, pad_id=binding.pad_id)

    def _sampling_params(self, sampling: Sampling, seed: int, binding: Binding) -> SamplingParams:
        """One row's request; everything that could change the distribution is set, so that no default decides."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            n=1,
            seed=seed,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            top_k=0 if sampling.greedy else sampling.top_k,
            top_p=1.0 if sampling.greedy else sampling.top_p,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            max_tokens=sampling.max_new_tokens,
            min_tokens=0,
            ignore_eos=True,  # stop_token_ids below decides
            stop_token_ids=self.ends(binding),
            logprobs=0,  # of the sampled token only
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    @property
    def positions(self) -> int | None:
        """Longest sequence, prompt and response."""
        _, binding, _ = self._require_setup()
        limits = [limit for limit in (binding.max_positions, self.max_model_len) if limit is not None]
        return min(limits, default=None)

    def describe(self) -> dict[str, Any]:
        """Every current setting, as plain values; ``ignored_generation_config`` lists the checkpoint's own."""
        _, binding, _ = self._require_setup()
        return self.described("vllm", binding, weight_bits=self.weight_bits, **self._resolved)

    def close(self) -> None:
        """Shut vLLM down and free its memory; :meth:`setup` may be called again."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        owns_process_group = self._owns_process_group
        self._forget()
        from vllm.distributed import parallel_state

        if owns_process_group:
            parallel_state.cleanup_dist_env_and_memory()
        else:
            parallel_state.destroy_model_parallel()

    def _forget(self) -> None:
        self._llm = self._lm = self._binding = None
        self._resolved = {}
        self._half_sent = self._asleep = self._owns_process_group = False

    def _wake(self) -> None:
        if self._asleep and self._llm is not None:
            self._llm.wake_up()
            self._asleep = False

    def _require_setup(self) -> tuple[LLM, Binding, PreTrainedModel]:
        if self._llm is None or self._binding is None or self._lm is None:
            raise RuntimeError("VLLMEngine.setup(lm, tokenizer) comes before any other call")
        return self._llm, self._binding, self._lm

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the settings and no engine; it needs a setup of its own."""
        unbound = copy.copy(self.__dict__)
        blank = object.__new__(type(self))
        blank._forget()
        return unbound | blank.__dict__


def _generated(output: Any, version: int) -> Generated:
    """One completion of vLLM; ``logprobs`` holds a mapping from token to entry at each position."""
    ids = list(output.token_ids)
    entries = output.logprobs or []  # assemble_rollout checks the number
    logprobs = [entry[token].logprob for token, entry in zip(ids, entries, strict=False)]
    return Generated(ids, logprobs, output.finish_reason, version)
