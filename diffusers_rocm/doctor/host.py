"""Static checks of the kernel's settings, of limits, and of RDMA."""

import re

from .finding import Finding, ok, problem, skipped, warning
from .machine import Machine
from .tools import ibv_abi_mismatches, ibv_devices


def iommu(machine: Machine) -> Finding:
    """Through an IOMMU that translates, peers hang (rccl #1129) or corrupt (vllm #51513)."""
    line = machine.read("/proc/cmdline")
    if line is None:
        return skipped("the kernel's command line is not readable")
    settings = re.findall(r"\b(?:amd_iommu|intel_iommu|iommu|iommu\.passthrough)=\S+", line)
    if not machine.listed("/sys/class/iommu"):
        return ok("there is no IOMMU, or it is off")
    through = r"\biommu=(?:\w+,)*(?:pt|off)\b|_iommu=off|\biommu\.passthrough=(?:1|y|on)\b"
    if any(re.search(through, each) for each in settings):
        return ok(", ".join(settings))
    cards = [f"/sys/bus/pci/devices/{card}/iommu_group" for card in machine.amd_cards]
    every = [f"/sys/kernel/iommu_groups/{group}" for group in machine.listed("/sys/kernel/iommu_groups")]
    kinds = {kind for folder in cards if (kind := machine.read(f"{folder}/type"))}
    kinds = kinds or {machine.read(f"{folder}/type") for folder in every}
    if kinds == {"identity"}:  # a kernel may be built to pass through
        return ok("the cards' groups pass through")
    return warning(
        f"an IOMMU without iommu=pt (the kernel was given {', '.join(settings) or 'nothing of it'})",
        "sudo sed -i 's/^GRUB_CMDLINE_LINUX=\"/&iommu=pt /' /etc/default/grub && sudo update-grub && sudo reboot",
    )


def numa_balancing(machine: Machine) -> Finding:
    """RCCL warns of it: pages that move make times vary."""
    value = machine.read("/proc/sys/kernel/numa_balancing")
    if value is None:
        return skipped("the kernel has no NUMA balancing")
    if value != "0":
        return warning("kernel.numa_balancing is on: times vary", "sudo sysctl kernel.numa_balancing=0")
    return ok("off")


def shared_memory(machine: Machine) -> Finding:
    """NCCL and RCCL keep buffers of pairs without P2P in it; Docker gives 64 MiB."""
    folder = machine.path("/dev/shm")
    if not folder.exists():
        return problem("no /dev/shm", "docker run --shm-size=8g ...")
    free = machine.free(folder)
    seen = f"{free / 2**30:.3g} GiB free in /dev/shm"
    if free < 2**30:
        return problem(
            f"{seen}, and several ranks want 1",
            "docker run --shm-size=8g ...  # or: sudo mount -o remount,size=8G /dev/shm",
        )
    return ok(seen)


def locked_memory(machine: Machine) -> Finding:
    """RDMA pins what it sends."""
    match = re.search(r"^Max locked memory\s+(\S+)", machine.read("/proc/self/limits") or "", re.MULTILINE)
    if match is None:
        return skipped("limits are not readable")
    if match[1] == "unlimited":
        return ok("unlimited")
    if not match[1].isdecimal():
        return skipped("limits are not readable")
    seen = f"{int(match[1]) / 2**20:.4g} MiB may be locked"
    if int(match[1]) < 2**30:
        return problem(
            f"{seen}, and RDMA pins its buffers", "ulimit -l unlimited  # docker run --ulimit memlock=-1:-1"
        )
    return ok(seen)


def rdma_devices(machine: Machine) -> Finding:
    """Ports that are up, and device files through which a process reaches them."""
    seen, up = [], 0
    for device in machine.rdma_devices:
        for port in machine.listed(f"/sys/class/infiniband/{device}/ports"):
            folder = f"/sys/class/infiniband/{device}/ports/{port}"
            state = (machine.read(f"{folder}/state") or "?").split(":")[-1].strip()
            kind = {"Ethernet": "RoCE"}.get(layer := machine.read(f"{folder}/link_layer") or "?", layer)
            seen.append(f"{device}:{port} {kind} {state}")
            up += state == "ACTIVE"
    text = ", ".join(seen) or ", ".join(machine.rdma_devices)
    if not any(name.startswith("uverbs") for name in machine.listed("/dev/infiniband")):
        return problem(f"{text}; no /dev/infiniband/uverbs*", "docker run --device /dev/infiniband --network=host ...")
    if not up:
        return problem(f"{text}: no port is up", "rdma link; ip link")
    return ok(text)


def rdma_library(machine: Machine) -> Finding:
    """Whether libibverbs, by which NCCL and RCCL use the devices, takes the kernel's."""
    fix = "sudo apt-get install --only-upgrade rdma-core libibverbs1 ibverbs-providers"
    text = machine.run(("ibv_devices",))
    if text is None:
        return skipped("ibv_devices is not installed")
    if mismatches := ibv_abi_mismatches(text):
        return problem(f"libibverbs does not fit the kernel's driver: {'; '.join(mismatches)}", fix)
    usable = ibv_devices(text)
    if missing := sorted(set(machine.rdma_devices) - set(usable)):
        return problem(f"libibverbs does not know {', '.join(missing)}", fix)
    return ok(f"{len(usable)} device(s)")
