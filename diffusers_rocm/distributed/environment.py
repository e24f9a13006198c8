"""Environment variables that ranks are started with: what some GPUs need, and what keeps a record of a hang.

Each is set for ranks that the launcher starts, before they import torch, and only where the user has not set it.
"""

import logging
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


logger = logging.getLogger(__name__)

RDNA3, RDNA4 = ("gfx1100", "gfx1101", "gfx1102"), ("gfx1200", "gfx1201")
STRIX = ("gfx1150", "gfx1151")  # RDNA 3.5, in a CPU
MI300, MI350 = ("gfx942",), ("gfx950",)


@dataclass(frozen=True)
class Setting:
    """A variable, the GPUs that want it, why, and who says so.

    Attributes:
        below: only where fewer of them than this work together on a node, and more than one.
    """

    name: str
    value: str
    archs: tuple[str, ...]
    why: str
    source: str
    below: int | None = None


SETTINGS = (
    Setting(
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
        "1",
        RDNA3 + STRIX + RDNA4,
        "torch has flash and memory-efficient attention for these GPUs, and keeps them off; it reads this once",
        "pytorch aten/src/ATen/native/transformers/cuda/sdp_utils.cpp; torch/testing/_internal/common_cuda.py",
    ),
    Setting(
        "MIOPEN_FIND_MODE",
        "FAST",
        RDNA3 + RDNA4,
        "the VAE's first decoding searches for the best kernels, for up to minutes",
        "MIOpen documentation, find modes; 84.5 s to 7.2 s on a 7900 XTX in YuE #169",
    ),
    Setting(
        "PYTORCH_MIOPEN_SUGGEST_NHWC",
        "1",
        RDNA4,
        "convolutions of a VAE are 4 to 34 times as slow in the other layout",
        "AMD-AGI Dockerfile.rdna4",
    ),
    Setting(
        "GPU_MAX_HW_QUEUES",
        "2",
        MI300 + MI350,
        "streams that share hardware queues keep collectives from running beside computing",
        "ROCm workload optimization guide for MI300X",
    ),
    Setting(
        "TORCH_NCCL_HIGH_PRIORITY",
        "1",
        MI300 + MI350,
        "with two hardware queues, one for collectives alone",
        "ROCm workload optimization guide for MI300X",
    ),
    Setting(
        "HIP_FORCE_DEV_KERNARG",
        "1",
        MI300 + MI350,
        "arguments of kernels lie in the memory of the GPU, which starts them sooner",
        "ROCm workload optimization guide for MI300X",
    ),
    Setting(
        "HSA_NO_SCRATCH_RECLAIM",
        "1",
        MI300 + MI350,
        "scratch memory that is taken back between kernels costs time; RCCL warns without it",
        "RCCL src/init.cc",
    ),
    Setting(
        "NCCL_MIN_NCHANNELS",
        "32",
        MI300,
        "RCCL takes too few channels to fill the links between some of the eight GPUs",
        "ROCm blog, RCCL bandwidth on MI300X",
        below=8,
    ),
)

# What torch and the collectives say themselves, by --log-level.
LOG_LEVELS: dict[str, dict[str, str]] = {
    "debug": {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO", "NCCL_DEBUG": "INFO"},
    "info": {"NCCL_DEBUG": "WARN"},
    "warning": {},
    "error": {"TORCH_CPP_LOG_LEVEL": "ERROR"},
}


def visible_archs() -> set[str]:
    """`gfx...` of the AMD GPUs that this process sees; empty with a torch that is no ROCm build."""
    if torch.version.hip is None:
        return set()
    every = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return {of.gcnArchName.partition(":")[0] for of in every}


def unset(archs: Collection[str], ranks: int, environment: Mapping[str, str]) -> list[Setting]:
    """What GPUs of these architectures want and the environment does not have, for so many ranks of a node."""
    return [
        setting
        for setting in SETTINGS
        if any(arch in setting.archs for arch in archs)
        and setting.name not in environment
        and (setting.below is None or 1 < ranks < setting.below)
    ]


def prepare(ranks: int, logs: Path | None) -> None:
    """Set what the ranks of this node are to be started with.

    Args:
        logs: a folder for the flight recorder's dump, where a collective of NCCL or RCCL has timed out.
    """
    for setting in unset(visible_archs(), ranks, os.environ):
        os.environ[setting.name] = setting.value
        logger.info("%s=%s: %s (%s)", setting.name, setting.value, setting.why, setting.source)
    recorder = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{logs}/flight_recorder_rank_",
    }
    for name, value in recorder.items() if logs is not None else ():
        if name not in os.environ:
            os.environ[name] = value
            logger.info("%s=%s: what the ranks last sent each other, kept if one hangs", name, value)
