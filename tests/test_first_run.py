"""The README's command for a user's own model: no supervised step, and the model's English is unchanged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support import needs_smollm2

ROOT = Path(__file__).resolve().parents[1]


def perplexity(lm: torch.nn.Module, tokenizer, text: str) -> float:
    """Perplexity of the first 400 tokens of a text."""
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :400]
    with torch.no_grad():
        return math.exp(lm(input_ids=ids, labels=ids).loss.item())


@pytest.mark.slow
@needs_smollm2
def test_three_iterations_of_ones_own_model_and_prompts_leave_english_as_it_was(compose, smollm2, tmp_path, capsys):
    """Everything as by default but for the numbers of prompts and tokens, which only save time."""
    from lightning_rlhf.assembly import load_checkpoint
    from lightning_rlhf.models import load_pretrained
    from lightning_rlhf.train import train

    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    loaded = load_pretrained(str(smollm2))
    before = perplexity(loaded.lm, loaded.tokenizer, text)
    rows = [(a, b) for a in range(10) for b in range(10)]
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)})
        for a, b in rows
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    line = ["model=hf", f"model.source.path={smollm2}", "data=jsonl", f"data.train.path={tmp_path}/prompts.jsonl"]
    fewer = ["data.prompts_per_iteration=8", "module.update.minibatch_size=4", "rollout.max_new_tokens=12"]
    short = ["iterations=3", "reward=numeric", "threads=1", "logger=none", "trainer.enable_progress_bar=false"]
    metrics = train(compose(*line, *fewer, *short))
    assert metrics["clock/update"] == 3 * 2 * 2
    assert "WARM-UP" not in capsys.readouterr().out
    _, saved = load_checkpoint(str(tmp_path))
    assert saved["lightning_rlhf"]["warm_up"] is None
    trained = {k.removeprefix("actor.lm."): v for k, v in saved["state_dict"].items() if k.startswith("actor.lm.")}
    moved = max((loaded.lm.get_parameter(n) - v).abs().max().item() for n, v in trained.items())
    loaded.lm.load_state_dict(trained, strict=False)
    after = perplexity(loaded.lm, loaded.tokenizer, text)
    print(f"perplexity of the licence: {before:.3f} -> {after:.3f}; largest change of a weight {moved:.1e}")
    assert moved > 0, "it was trained"
    assert after == pytest.approx(before, rel=0.02)
