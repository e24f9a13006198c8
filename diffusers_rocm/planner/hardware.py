"""What GPUs and links can do, as far as a plan needs it."""

import difflib
import re
from dataclasses import dataclass

import torch

from ..distributed.links import FAST


@dataclass(frozen=True)
class GPU:
    """What is reached in a transformer's step, which is less than a data sheet's peak.

    Attributes:
        matmul, attention, masked_attention: FLOP a second.
        fused, eager: bytes a second of what a compiler fused, and of single operations, whose results partly stay in
            the cache.
        launch: seconds of the host to start one operation.
        units: multiprocessors or compute units; a product of few tiles leaves some idle.
        memory: bytes.
        link: bytes a second that it sends, and receives meanwhile, inside its node.
        pairs: whether two units make what torch calls a multiprocessor.
        measured: whether these numbers are measured, or a share of the data sheet's that was.
    """

    name: str
    matmul: float
    attention: float
    masked_attention: float
    fused: float
    eager: float
    units: int
    memory: float
    link: float
    measured: bool
    launch: float = 15e-6
    pairs: bool = False

    @property
    def multiprocessors(self) -> int:
        """As torch counts them: RDNA's compute units in pairs."""
        return self.units // 2 if self.pairs else self.units


@dataclass(frozen=True)
class Links:
    """Between GPUs of a node and between nodes, for each GPU.

    Attributes:
        inside, between: bytes a second that a GPU sends, and receives meanwhile.
        latency: seconds of a collective of nothing.
    """

    inside: float
    between: float
    latency: float = 15e-6


# Bytes a second of each GPU: by a network adapter of its own of 400 Gb/s; by PCIe 4.0 x16, through a host's memory.
BETWEEN_NODES, PCIE = 50e9, 12e9


def to_one_neighbour(rate: float) -> float:
    """Bytes a second where each sends to one neighbour alone: through a host's memory 22 GB/s were measured of 31."""
    return 0.72 * rate if rate < FAST else rate


# Shares of a data sheet's peak of bf16 and of bandwidth: matmul, attention, masked attention, fused, eager.
# Of the H200 they are fitted to 42 compiled and 18 eager rows of earlier runs; those of docs/benchmarks check them
# (utils/check_planner.py).
_H200 = (0.642, 0.581, 0.395, 0.573, 0.781)
# No AMD hardware was measured. These are lower on purpose: AMD's libraries reach less of their peak.
_CDNA = (0.45, 0.35, 0.25, 0.5, 0.65)
_RDNA = (0.4, 0.25, 0.15, 0.55, 0.7)

# Data sheets of the vendors: dense bf16 TFLOP/s with sums in float32, GB/s, GB, units; then the link of GPUs inside a
# node, GB/s that one sends: NVLink as measured on H200, xGMI as AMD reports it, PCIe 4.0 x16 through host memory.
_SHEETS = {
    "H200": (989, 4800, 141, 132, 310, _H200),
    "H100": (989, 3350, 80, 132, 310, _H200),
    "A100": (312, 2039, 80, 108, 200, _H200),
    "L20": (119.5, 864, 48, 92, 12, _H200),
    "RTX 4090": (165, 1008, 24, 128, 12, _H200),
    "RTX 3090": (71, 936, 24, 82, 12, _H200),
    "MI355X": (2500, 8000, 288, 256, 320, _CDNA),
    "MI325X": (1307, 6000, 256, 304, 320, _CDNA),
    "MI300X": (1307, 5300, 192, 304, 320, _CDNA),
    "MI250X": (191.5, 1638, 64, 110, 50, _CDNA),
    "RX 7900 XTX": (122.8, 960, 24, 96, 12, _RDNA),
    "RX 7900 XT": (103, 800, 20, 84, 12, _RDNA),
    "RX 7800 XT": (74.6, 624, 16, 60, 12, _RDNA),
    "PRO W7900": (122.6, 864, 48, 96, 12, _RDNA),
    "RX 9070 XT": (195, 645, 16, 64, 12, _RDNA),
    "AI PRO R9700": (191, 645, 32, 64, 12, _RDNA),
}

GPUS = {
    name: GPU(
        name,
        *(tflops * 1e12 * share for share in shares[:3]),
        *(bandwidth * 1e9 * share for share in shares[3:]),
        units,
        memory * 1e9,
        link * 1e9,
        name == "H200",
        pairs=shares is _RDNA,
    )
    for name, (tflops, bandwidth, memory, units, link, shares) in _SHEETS.items()
}


def find_gpu(name: str | None) -> GPU:
    """The GPU of this name; without one, this machine's, and where it has none a Radeon of 16 GB.

    Raises:
        ValueError: none is known by the name.
    """
    if name is None:
        here = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "RX 7800 XT"
        for gpu in GPUS.values():
            if _plain(gpu.name) in _plain(here):
                return gpu
        raise ValueError(f"what {here} reaches is not known: measure it with --measure, or name one like it as --gpu")
    asked = _plain(name)
    found = [gpu for gpu in GPUS.values() if asked and asked in _plain(gpu.name)]
    exact = [gpu for gpu in found if f" {gpu.name}".lower().endswith(f" {name}".lower()) or _plain(gpu.name) == asked]
    if len(exact or found) != 1:
        near = [gpu.name for gpu in found] or difflib.get_close_matches(name, GPUS, 3, 0.3) or GPUS
        raise ValueError(f"--gpu {name}: {'which of' if found else 'unknown; there are'} {', '.join(near)}")
    return (exact or found)[0]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
