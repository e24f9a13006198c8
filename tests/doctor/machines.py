"""Machines made of a folder: what the static checks read of `/`, and what tools print there."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusers_rocm.doctor.finding import Finding
from diffusers_rocm.doctor.machine import Machine, TorchBuild
from diffusers_rocm.doctor.static import static_checks


ROCM = TorchBuild(
    "2.9.1+rocm6.4",
    hip="6.4.43484",
    architectures=("gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1101", "gfx1200", "gfx1201"),
    devices=({"name": "AMD Radeon RX 7900 XTX", "architecture": "gfx1100", "memory": 24 << 30, "peers": [1]},) * 2,
)
CUDA = TorchBuild(
    "2.11.0+cu130",
    cuda="13.0",
    architectures=("sm_90",),
    devices=({"name": "NVIDIA H200", "architecture": "sm_90", "memory": 140 << 30, "peers": [1]},) * 2,
)
CPU = TorchBuild("2.13.0+cpu")
GOOD_SETTINGS = {"TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "1", "MIOPEN_FIND_MODE": "FAST"}
VERSIONS = {
    "gfx1100": 110000,
    "gfx1101": 110001,
    "gfx1036": 100306,
    "gfx942": 90402,
    "gfx90a": 90010,
    "gfx1151": 110501,
    "gfx1030": 100300,
    "gfx950": 90500,
    "gfx1201": 120001,
}
BUS = "/sys/bus/pci/devices"


def pci_card(address: str, vendor: str = "0x1002", kind: str = "0x030000", **files: str) -> dict[str, str]:
    """A display device, x16 of generation 4 with 24 GiB that are all in its window."""
    content = {
        "vendor": vendor,
        "class": kind,
        "current_link_width": "16",
        "current_link_speed": "16.0 GT/s PCIe",
        "max_link_width": "16",
        "max_link_speed": "16.0 GT/s PCIe",
        "mem_info_vram_total": str(24 << 30),
        "resource": f"{0x7800000000:#018x} {0x7800000000 + (32 << 30) - 1:#018x} 0x000000000014220c\n"
        "0x0000000000000000 0x0000000000000000 0x0000000000000000",
    } | files
    return {f"{BUS}/{address}/{name}": text for name, text in content.items()}


def kfd_node(number: int, architecture: str | None, bus: int = 0) -> dict[str, str]:
    """A node of the compute driver: a GPU on this bus, or a CPU."""
    version = VERSIONS[architecture] if architecture else 0
    text = (
        f"cpu_cores_count {0 if version else 16}\nsimd_count {192 if version else 0}\ngfx_target_version {version}\n"
        f"location_id {bus << 8}\ndomain 0\n"
    )
    return {f"/sys/class/kfd/kfd/topology/nodes/{number}/properties": text}


def rdma_device(
    name: str, state: str = "4: ACTIVE", layer: str = "Ethernet", gids: Sequence[str] = ()
) -> dict[str, str]:
    port = f"/sys/class/infiniband/{name}/ports/1"
    table = {f"{port}/gids/{index}": gid for index, gid in enumerate(gids)}
    return {f"{port}/state": state, f"{port}/link_layer": layer} | table


def radeons(*architectures: str) -> dict[str, str]:
    """A healthy workstation with these GPUs."""
    files = {
        "/dev/kfd": "",
        "/dev/shm/nothing": "",
        "/proc/cmdline": "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro iommu=pt quiet",
        "/proc/sys/kernel/numa_balancing": "0\n",
        "/sys/class/iommu/ivhd0/version": "2",
        "/sys/class/net/lo/mtu": "65536",
        "/sys/class/net/eno1/mtu": "1500",
        "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n",
        **kfd_node(0, None),
    }
    for index, architecture in enumerate(architectures):
        bus = 3 + 32 * index
        files |= kfd_node(index + 1, architecture, bus) | pci_card(f"0000:{bus:02x}:00.0")
        files[f"/dev/dri/renderD{128 + index}"] = ""
    return files


def machine(
    root: Path,
    files: Mapping[str, str | None],
    torch: TorchBuild = ROCM,
    environment: Mapping[str, str] = GOOD_SETTINGS,
    tools: Mapping[str, str | Exception] | None = None,
    **functions: Any,
) -> Machine:
    """
    Args:
        files: by absolute path; None for one that is not there after all.
        tools: what they print, or raise, by their whole command line.
        functions: `access`, `free` and `addressed` of `Machine`.
    """
    for name, text in files.items():
        if text is not None:
            file = root / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    def run(command: Sequence[str]) -> str | None:
        answer = (tools or {}).get(" ".join(command))
        if isinstance(answer, Exception):
            raise answer
        return answer

    functions = {
        "access": lambda file: True,
        "free": lambda file: 64 << 30,
        "addressed": lambda: ("lo", "eno1"),
    } | functions
    return Machine(torch, root, dict(environment), run, **functions)


def all_of(given: Machine) -> dict[str, Finding]:
    """Findings of every static check, by its name."""
    return {each.name: each for each in static_checks(given)}
