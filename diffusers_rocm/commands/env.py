"""`diffusers-rocm env`: what this machine and its libraries are, made to be pasted into an issue."""

import argparse
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from .. import __version__
from ..doctor.privacy import without_names


PACKAGES = (
    "diffusers", "transformers", "accelerate", "safetensors", "peft", "torchao", "triton",
    "pytorch-triton-rocm", "flash-attn", "aiter", "gguf", "cache-dit",
)  # fmt: skip
# Environment variables that change how things run.
VARIABLES = re.compile(
    r"(NCCL|RCCL|HSA|HIP|ROCR|ROCM|GPU|CUDA|TORCH|PYTORCH|TORCHINDUCTOR|MIOPEN|GLOO|OMP|AITER|UCX|FI)_\w+"
    r"|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_PORT"
    r"|DIFFUSERS_ATTN_BACKEND|HF_HUB_OFFLINE|LD_LIBRARY_PATH"
)
SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|KEY", re.IGNORECASE)
# What tells how the GPUs are linked, the first of these that there is.
TOPOLOGY = (("amd-smi", "topology"), ("rocm-smi", "--showtopo"), ("nvidia-smi", "topo", "-m"))


def add_parser(subparsers) -> argparse.ArgumentParser:
    parser = subparsers.add_parser("env", help="versions, GPUs, links and settings, to paste into an issue")
    parser.add_argument("--json", action="store_true", help="as JSON")
    return parser


def check(args: argparse.Namespace) -> None:
    """Any of its options is fine."""


def run(request: None, args: argparse.Namespace, argv: list[str]) -> int:
    found = collect()
    print(json.dumps(found, indent=2) if args.json else report(found))
    return 0


def collect() -> dict[str, Any]:
    """What is known without a process group; nothing of it names the user or the machine."""
    build = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {
        "date": f"{datetime.now(timezone.utc):%Y-%m-%d}",
        "packages": packages(),
        "sources": sources(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch build": build if torch.version.hip or torch.version.cuda else "CPU only",
        "torch architectures": torch.cuda.get_arch_list(),
        "collectives": _collectives(),
        "cpus": os.cpu_count(),
        "memory GiB": round(psutil.virtual_memory().total / 2**30, 1),
        "shared memory GiB": round(shutil.disk_usage("/dev/shm").total / 2**30, 1)
        if Path("/dev/shm").exists()
        else None,
        "gpus": [_gpu(index) for index in range(torch.cuda.device_count())],
        "topology": _topology(),
        "network": {
            name: f"{'up' if state.isup else 'down'}, {state.speed} Mb/s"
            for name, state in psutil.net_if_stats().items()
        },
        "rdma": sorted(each.name for each in Path("/sys/class/infiniband").glob("*")),
        "environment": settings(),
    }


def packages() -> dict[str, str]:
    """Versions of what is installed."""
    found = {name: version for name in PACKAGES if (version := _version(name))}
    return {"diffusers_rocm": __version__, "torch": torch.__version__} | found


def sources() -> str:
    """By which two runs are known to be of the same code: a hash of this package's files."""
    root, found = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        found.update(f"{file.relative_to(root).as_posix()} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()[:12]


def settings() -> dict[str, str]:
    """The environment variables that change how things run."""
    return {
        name: without_names(value)
        for name, value in sorted(os.environ.items())
        if VARIABLES.fullmatch(name) and not SECRET.search(name)
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _collectives() -> list[str]:
    found = ["Gloo"] if dist.is_available() and dist.is_gloo_available() else []
    if dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        found.append(f"{'RCCL' if torch.version.hip else 'NCCL'} {version}")
    return found


def _gpu(index: int) -> dict[str, Any]:
    of = torch.cuda.get_device_properties(index)
    others = [other for other in range(torch.cuda.device_count()) if other != index]
    return {
        "name": of.name,
        "architecture": of.gcnArchName if torch.version.hip else f"sm_{of.major}{of.minor}",
        "memory GiB": round(of.total_memory / 2**30, 1),
        "peer access": [other for other in others if torch.cuda.can_device_access_peer(index, other)],
    }


def _topology() -> str | None:
    tool = next((tool for tool in TOPOLOGY if shutil.which(tool[0])), None)
    if tool is None:
        return None
    try:
        result = subprocess.run(tool, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(tool)}: {type(error).__name__}"
    colours = re.compile(r"\x1b\[[0-9;]*m")
    return without_names(f"$ {' '.join(tool)}\n{colours.sub('', result.stdout or result.stderr).strip()}")


def report(found: dict[str, Any]) -> str:
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key}: {item}" for key, item in value.items())]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(f"{name}:")
            for index, each in enumerate(value):
                lines.append(f"  {index}: {', '.join(f'{key} {item}' for key, item in each.items())}")
        elif isinstance(value, str) and "\n" in value:
            lines += [f"{name}:", *(f"  {line}" for line in value.splitlines())]
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"{name}: {'none' if shown in (None, '') else shown}")
    return "\n".join(lines)
