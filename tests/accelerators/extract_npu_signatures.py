"""Read the signatures that the package calls out of a torch-npu wheel, without installing it (which needs CANN).

    pip download --no-deps torch-npu==2.13.0 -d /tmp/wheel
    cd tests/accelerators && python extract_npu_signatures.py /tmp/wheel/torch_npu-*.whl > npu_signatures.json

Python functions come from the wheel's sources, operators from the schemas that its library registers with PyTorch.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from typing import Any

FUNCTIONS = [
    *("device_count", "is_available", "is_initialized", "current_device", "set_device", "manual_seed_all"),
    *("empty_cache", "memory_stats", "max_memory_allocated", "reset_peak_memory_stats", "mem_get_info"),
    *("get_rng_state", "set_rng_state", "get_amp_supported_dtype", "_is_in_bad_fork"),
]
"""Of ``torch.npu``: what the package calls, and what PyTorch itself asks of a device's module."""
SCALER = ["__init__", "scale", "unscale_", "step", "update", "state_dict", "load_state_dict"]
OPERATORS = ["npu_rms_norm", "npu_swiglu", "npu_fusion_attention"]


def arguments(function: ast.FunctionDef) -> str:
    """The arguments with their defaults, annotations and ``self`` left out, as they stand in a ``def``."""
    for argument in ast.walk(function.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(function.args).removeprefix("self").removeprefix(", ")


def definitions(source: bytes) -> dict[str, Any]:
    nodes = ast.parse(source).body
    return {node.name: node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}


def public_names(source: bytes) -> list[str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return ast.literal_eval(node.value)
    raise LookupError("no __all__")


def backends(source: bytes) -> dict[str, list[str]]:
    """Process group backends by name, and the kinds of device that each is for."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("register_backend"):
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            found[ast.literal_eval(node.args[0])] = ast.literal_eval(keywords["devices"])
    return found


def extract(path: str) -> dict[str, Any]:
    with zipfile.ZipFile(path) as wheel:
        package = wheel.read("torch_npu/npu/__init__.py")
        files = [n for n in wheel.namelist() if re.fullmatch(r"torch_npu/npu/\w+\.py", n)]
        defined = {name: node for file in files for name, node in definitions(wheel.read(file)).items()}
        defined |= definitions(package)
        missing = [n for n in FUNCTIONS if n not in public_names(package) and not n.startswith("_")]
        if missing:
            raise LookupError(f"torch.npu has no public {missing}")
        scaler = definitions(wheel.read("torch_npu/npu/amp/grad_scaler.py"))["GradScaler"]
        methods = {node.name: node for node in scaler.body if isinstance(node, ast.FunctionDef)}
        library = wheel.read("torch_npu/lib/libtorch_npu.so")
        schemas = {}
        for name in OPERATORS:
            [schema] = set(re.findall(rb"(?<![\w:])" + name.encode() + rb"\([^\x00]*\) -> [^\x00]+", library))
            schemas[name] = schema.decode()
        version = re.findall(r"= '(.*)'", wheel.read("torch_npu/version.py").decode())
        return {
            "torch-npu": dict(zip(("version", "git"), version, strict=True)),
            "functions": {name: arguments(defined[name]) for name in FUNCTIONS},
            "grad_scaler": {
                "bases": [ast.unparse(base) for base in scaler.bases],
                "methods": {name: arguments(methods[name]) for name in SCALER},
            },
            "operators": schemas,
            "process_group_backends": backends(wheel.read("torch_npu/_init/registry/distributed.py")),
        }


if __name__ == "__main__":
    print(json.dumps(extract(sys.argv[1]), indent=2))
