"""The embedded rollout engine against ``GenerationMixin.generate`` on the same model and prompts.

    python benchmarks/generation.py                     # tiny: vocabulary 512, hidden 128, 4 layers
    python benchmarks/generation.py --model smollm2     # the shape of SmolLM2-135M, random weights

Both sample at temperature 1 from the whole vocabulary and return the log-probabilities of the tokens they sampled.
They alternate; the table shows medians of wall-clock seconds and their ratio (above 1: the engine is faster). Rows:

- exact: every response has exactly ``--new-tokens`` tokens, all prompts are equally long;
- padded: as exact, half of the prompts are a quarter shorter;
- ragged: responses end at random, after ``--new-tokens`` / 4 tokens on average, so that rows leave the batch;
- samples: as exact, every prompt has 8 samples and one prefill.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from lightning_rlhf.experience import PromptBatch
from lightning_rlhf.rollout import HFEngine
from lightning_rlhf.rollout.base import pad_left

SHAPES = {
    "tiny": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 512, "layers": 4, "heads": 4, "kv_heads": 4},
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "layers": 30,
        "heads": 9,
        "kv_heads": 3,
    },
}


def build(shape: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


def prompts(vocabulary: int, rows: int, tokens: int, *, padded: bool) -> PromptBatch:
    ids = torch.randint(1, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(1)).tolist()
    if padded:
        ids = [row[tokens // 4 :] if index % 2 else row for index, row in enumerate(ids)]
    names = [str(index) for index in range(rows)]
    return PromptBatch(ids, names, names, [{}] * rows, [0] * rows)


def with_engine(lm: LlamaForCausalLM, batch: PromptBatch, new: int, samples: int, ends: list[int]) -> int:
    engine = HFEngine(stop_token_ids=ends, ignore_eos=not ends)
    engine.setup(lm, SimpleNamespace(eos_token_id=None, pad_token_id=0))  # type: ignore[arg-type]
    rollout = engine.generate(batch, samples=samples, max_new_tokens=new, seed=0)
    return int(rollout.response_mask.sum())


def with_generate(lm: Any, batch: PromptBatch, new: int, samples: int, ends: list[int]) -> int:
    ids, mask = pad_left(batch.ids, 0)
    config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        num_return_sequences=samples,
        pad_token_id=0,
        eos_token_id=ends or None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    out = lm.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config)
    lm.compute_transition_scores(out.sequences, out.logits, normalize_logits=True)
    return int((out.sequences[:, ids.shape[1] :] != 0).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="tiny")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--prompt-tokens", type=int)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.model]
    vocabulary, lm, new = shape["vocab_size"], build(shape), args.new_tokens
    rows = args.prompts or (64 if args.model == "tiny" else 8)
    tokens = args.prompt_tokens or (32 if args.model == "tiny" else 64)
    ends = list(range(1, vocabulary * 4 // new))  # a random model draws one of them with probability 4 / new
    equal, padded = (prompts(vocabulary, rows, tokens, padded=shorter) for shorter in (False, True))
    cases = {
        "exact": (equal, 1, []),
        "padded": (padded, 1, []),
        "ragged": (equal, 1, ends),
        "samples": (prompts(vocabulary, max(1, rows // 8), tokens, padded=False), 8, []),
    }
    print(f"{args.model}, {rows} rows, prompts of {tokens} tokens, at most {new} new, {args.threads} threads, fp32")
    print(f"{'':10}{'generate':>10}{'engine':>10}{'ratio':>8}{'tokens/s':>10}")
    for name, (batch, samples, stop) in cases.items():
        seconds: dict[str, list[float]] = {"generate": [], "engine": []}
        produced = 0
        for _ in range(args.repeats + 1):  # the first round warms up
            for side, call in (("generate", with_generate), ("engine", with_engine)):
                start = time.perf_counter()
                produced = call(lm, batch, new, samples, stop)
                seconds[side].append(time.perf_counter() - start)
        theirs, ours = (statistics.median(seconds[side][1:]) for side in ("generate", "engine"))
        print(f"{name:10}{theirs:10.3f}{ours:10.3f}{theirs / ours:8.2f}{produced / ours:10.0f}")


if __name__ == "__main__":
    main()
