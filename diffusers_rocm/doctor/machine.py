"""The machine as files, settings and tools show it: what the static checks read.

Everything is read below one root folder, and tools are run by one function, so that a folder can stand in for a
machine.
"""

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil


AMD, NVIDIA = "0x1002", "0x10de"

# Processors that are part of a CPU (LLVM's user guide of the AMDGPU backend calls them APUs).
INTEGRATED = (
    "gfx902", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037", "gfx1103", "gfx1150", "gfx1151",
    "gfx1152", "gfx1153",
)  # fmt: skip


def run_tool(command: Sequence[str]) -> str | None:
    """What a tool prints, both streams; None where it is not installed. Raises ValueError where it fails or hangs."""
    if shutil.which(command[0]) is None:
        return None
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{' '.join(command)}: {type(error).__name__}") from None
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise ValueError(f"{' '.join(command)}: exit code {result.returncode}{': ' + said[-1] if said else ''}")
    return result.stdout + result.stderr


def addressed_interfaces() -> list[str]:
    """Network interfaces that are up and have an address."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    with_one = (
        name for name, found in psutil.net_if_addrs().items() if any(each.family in families for each in found)
    )
    return sorted(name for name in with_one if name in up)


@dataclass(frozen=True)
class TorchBuild:
    """What torch says of itself and of the devices that it sees.

    Attributes:
        hip: version of ROCm that it was built for, or None.
        cuda: the same of CUDA.
        architectures: that it has kernels for; known only where a GPU could be opened.
        devices: each with `name`, `architecture`, `memory` in bytes, and `peers` that it can reach.
        folder: of its libraries.
    """

    version: str
    hip: str | None = None
    cuda: str | None = None
    architectures: tuple[str, ...] = ()
    devices: tuple[Mapping[str, Any], ...] = ()
    folder: str = ""


@dataclass(frozen=True)
class Machine:
    """
    Attributes:
        root: "/", or a folder in its place.
        run: runs a tool: what it prints, or None where it is not installed; ValueError where it fails.
        access: whether this user may read and write a file.
        free: bytes that are free where a file lies.
        addressed: network interfaces that are up and have an address.
    """

    torch: TorchBuild
    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: Callable[[Sequence[str]], str | None] = run_tool
    access: Callable[[Path], bool] = lambda file: os.access(file, os.R_OK | os.W_OK)
    free: Callable[[Path], int] = lambda file: shutil.disk_usage(file).free
    addressed: Callable[[], Collection[str]] = addressed_interfaces

    def path(self, file: str) -> Path:
        return self.root / file.lstrip("/")

    def read(self, file: str | Path) -> str | None:
        """A file's text without the spaces round it, or None where there is none, or it may not be read."""
        try:
            return self.path(str(file)).read_text(errors="replace").strip()
        except OSError:
            return None

    def listed(self, folder: str) -> list[str]:
        try:
            return sorted(each.name for each in self.path(folder).iterdir())
        except OSError:
            return []

    def _cards(self, vendor: str) -> tuple[str, ...]:
        """PCI addresses of display and compute devices (classes 03 and 12: Instinct cards are the latter)."""
        folder = "/sys/bus/pci/devices"
        return tuple(
            each
            for each in self.listed(folder)
            if self.read(f"{folder}/{each}/vendor") == vendor
            and (self.read(f"{folder}/{each}/class") or "")[:4] in ("0x03", "0x12")
        )

    @cached_property
    def amd_cards(self) -> tuple[str, ...]:
        return self._cards(AMD)

    @cached_property
    def nvidia_cards(self) -> tuple[str, ...]:
        return self._cards(NVIDIA)

    @cached_property
    def _kfd_gpus(self) -> tuple[tuple[str, str], ...]:
        """`gfx1100` and the PCI address of each GPU that the compute driver has, in its order, which is HIP's."""
        folder, found = "/sys/class/kfd/kfd/topology/nodes", []
        for node in sorted(filter(str.isdecimal, self.listed(folder)), key=int):
            properties = {
                words[0]: int(words[1])
                for line in (self.read(f"{folder}/{node}/properties") or "").splitlines()
                if len(words := line.split()) == 2 and words[1].isdecimal()
            }
            if version := properties.get("gfx_target_version", 0):
                found.append(
                    (gfx_name(version), pci_address(properties.get("domain", 0), properties.get("location_id", 0)))
                )
        return tuple(found)

    @cached_property
    def kfd_architectures(self) -> tuple[str, ...]:
        """Of each GPU that the compute driver has."""
        return tuple(architecture for architecture, _ in self._kfd_gpus)

    @property
    def integrated(self) -> set[str]:
        """PCI addresses of GPUs that are part of the CPU, where the compute driver has them."""
        return {address for architecture, address in self._kfd_gpus if architecture in INTEGRATED}

    @property
    def has_amd(self) -> bool:
        return bool(self.amd_cards or self.kfd_architectures or (self.torch.hip and self.torch.devices))

    @property
    def has_nvidia(self) -> bool:
        return bool(self.nvidia_cards or (self.torch.cuda and self.torch.devices))

    @property
    def is_for_amd(self) -> bool:
        """Are AMD's the GPUs to compute on?

        Beside NVIDIA's where torch is for AMD's; or where it is for none, and one of AMD's is more than the CPU's own.
        """
        if self.torch.hip or not self.has_nvidia:
            return self.has_amd
        return not self.torch.cuda and not {*self.kfd_architectures} <= {*INTEGRATED}

    @property
    def gpus(self) -> int:
        """How many there are, by whoever knows of most."""
        return max(len(self.torch.devices), len(self.kfd_architectures), len(self.amd_cards) + len(self.nvidia_cards))

    @property
    def rdma_devices(self) -> list[str]:
        return self.listed("/sys/class/infiniband")

    @property
    def rdma_ports(self) -> list[str]:
        """`mlx5_0:1`"""
        folder = "/sys/class/infiniband"
        return [f"{each}:{port}" for each in self.rdma_devices for port in self.listed(f"{folder}/{each}/ports")]

    @cached_property
    def usable_interfaces(self) -> list[str]:
        addressed = self.addressed()
        return [name for name in self.interfaces if name in addressed]

    @property
    def interfaces(self) -> list[str]:
        return self.listed("/sys/class/net")


def gfx_name(version: int) -> str:
    """110001 is gfx1101, 90010 is gfx90a: decimal pairs of major, minor and stepping, written in hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def pci_address(domain: int, location: int) -> str:
    """`0000:03:00.0`, of bus, device and function in one number, as the compute driver has them."""
    return f"{domain:04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def number(text: str | None) -> float | None:
    """The first number in a text: of `16.0 GT/s PCIe`, of `x16`."""
    match = re.search(r"\d+(\.\d+)?", text or "")
    return float(match[0]) if match else None
