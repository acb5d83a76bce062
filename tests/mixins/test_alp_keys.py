"""Changing any key of the block ``module.alp`` changes a real run; see tests/schema/test_keys.py."""

from __future__ import annotations

import pytest

from lightning_rlhf import schema
from tests.schema.test_keys import Change, observe, overrides

FREE = ["alp=default", "module.alp.warmup_steps=0", "module.alp.init_sigma=0.01", "module.alp.lr=0.05"]
"""Sigma is large enough to be seen and learns at once."""

SHRINKS = [*FREE, "module.alp.kl_limit=1e-12"]
RISES = [*FREE, "module.alp.variance_limit=1e-12"]

RUN: dict[str, Change | str] = {
    "ratio": ("decoupled", FREE),
    "init_sigma": ("0.02", FREE),
    "sigma_bounds": ("[0.0099,0.0101]", FREE),
    "granularity": ("channel", FREE),
    "layer_range": ("[1,1]", [*FREE, "model.source.layers=2"]),
    "warmup_steps": ("5", FREE),
    "lr": ("0.02", FREE),
    "clip_norm": ("0.0005", FREE),
    "max_clip_norm": ("1.01e-3", RISES),
    "variance_limit": ("1e12", RISES),
    "kl_limit": ("1e-12", FREE),
    "min_lr_factor": ("0.9", SHRINKS),
    "step": ("0.5", SHRINKS),
    "smoothing": ("0.0", RISES),
    "quantise_bits": ("8", FREE),
    "compare_every": ("1", FREE),
}

SEEN_OTHERWISE = {
    "layers",  # models/test_perturbation.py: names layers that are not found
    "router",  # test_alp.py: its three keys, on a mixture of experts
}


def test_every_key_has_an_entry(compose):
    block = schema.check(compose("alp=default"))["module"]["alp"]
    assert set(block) == set(RUN) | SEEN_OTHERWISE
    assert schema.check(compose())["module"].get("alp") is None


@pytest.mark.slow
@pytest.mark.parametrize("key", RUN)
def test_a_run_changes(compose, tmp_path_factory, key):
    before, after = overrides(f"module.alp.{key}", {f"module.alp.{name}": change for name, change in RUN.items()})
    assert observe(compose, tmp_path_factory, before) != observe(compose, tmp_path_factory, after)
