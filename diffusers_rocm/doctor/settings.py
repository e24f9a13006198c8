"""Static checks of environment variables that cannot work as they are set."""

import re
from collections.abc import Sequence

from .finding import Finding, ok, problem, skipped, warning
from .machine import Machine


# NCCL reads these as integers and passes over anything else.
NUMBERS = (
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_WIN_ENABLE", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS",
    "NCCL_NET_GDR_READ", "NCCL_CROSS_NIC", "HSA_FORCE_FINE_GRAIN_PCIE", "HSA_NO_SCRATCH_RECLAIM",
    "GPU_MAX_HW_QUEUES", "HIP_FORCE_DEV_KERNARG", "TORCH_NCCL_HIGH_PRIORITY",
)  # fmt: skip
WORDS = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS"),
    "MIOPEN_FIND_MODE": ("NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID", "TRUST_VERIFY", "TRUST_VERIFY_FULL"),
}
FILES = ("NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")


def chosen(value: str, names: Sequence[str]) -> list[str]:
    """The names that a list in NCCL's syntax lets through.

    Names are prefixes, with commas between; `=` in front makes them whole names, and `^` what is left out. An HCA may
    have a port: `mlx5_0:1`.
    """
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    wanted = [word.split(":")[0] for word in value.split(",") if word]

    def matches(name: str) -> bool:
        return any(name == word if exact else name.startswith(word) for word in wanted)

    return [name for name in names if matches(name) != exclude]


def socket_interfaces(machine: Machine) -> Finding:
    value, names = machine.environment.get("NCCL_SOCKET_IFNAME"), machine.interfaces
    if not value or not names:
        return skipped("NCCL_SOCKET_IFNAME is not set" if not value else "interfaces are not readable")
    found = chosen(value, names)
    if not found:
        return problem(
            f"NCCL_SOCKET_IFNAME={value} leaves none of {', '.join(names)}",
            f"export NCCL_SOCKET_IFNAME={_best(names)}",
        )
    return ok(f"NCCL_SOCKET_IFNAME={value} is {', '.join(found)}")


def gloo_interfaces(machine: Machine) -> Finding:
    """Gloo takes whole names, each of which has to be there."""
    value, names = machine.environment.get("GLOO_SOCKET_IFNAME"), machine.interfaces
    if not value or not names:
        return skipped("GLOO_SOCKET_IFNAME is not set" if not value else "interfaces are not readable")
    missing = [name for name in value.split(",") if name not in names]
    if missing:
        return problem(
            f"GLOO_SOCKET_IFNAME={value}: {', '.join(map(repr, missing))} is none of {', '.join(names)}",
            f"export GLOO_SOCKET_IFNAME={_best(names)}",
        )
    return ok(f"GLOO_SOCKET_IFNAME={value}")


def _best(names: Sequence[str]) -> str:
    """The interface that most likely goes out."""
    return next((name for name in names if not re.match(r"lo$|docker|veth|br-|virbr", name)), names[0])


def rdma_names(machine: Machine) -> Finding:
    value, names = machine.environment.get("NCCL_IB_HCA"), machine.rdma_devices
    if not value:
        return skipped("NCCL_IB_HCA is not set")
    if not names:
        return problem(
            f"NCCL_IB_HCA={value}, and there is no RDMA device", "unset NCCL_IB_HCA; ls /sys/class/infiniband"
        )
    found = chosen(value, names)
    if not found:
        return problem(
            f"NCCL_IB_HCA={value} leaves none of {', '.join(names)}", f"export NCCL_IB_HCA={','.join(names)}"
        )
    return ok(f"NCCL_IB_HCA={value} is {', '.join(found)}")


def rdma_gid(machine: Machine) -> Finding:
    """RoCE sends from an address out of a table; the entry that is asked for has to be one."""
    value = machine.environment.get("NCCL_IB_GID_INDEX", "")
    names = chosen(machine.environment.get("NCCL_IB_HCA") or "^", machine.rdma_devices)
    if not value.isdecimal() or not names:
        return skipped("NCCL_IB_GID_INDEX is not set" if names else "there are no RDMA devices")
    empty = [
        name
        for name in names
        if not (machine.read(f"/sys/class/infiniband/{name}/ports/1/gids/{value}") or "").strip("0:")
    ]
    if empty:
        return problem(
            f"NCCL_IB_GID_INDEX={value} is empty on {', '.join(empty)}",
            "show_gids || grep . /sys/class/infiniband/*/ports/*/gids/*",
        )
    return ok(f"NCCL_IB_GID_INDEX={value}")


def values(machine: Machine) -> Finding:
    """Numbers, words and files that are none."""
    wrong = {}
    for name, value in sorted(machine.environment.items()):
        if name in NUMBERS and not re.fullmatch(r"\s*-?(\d+|0[xX][0-9a-fA-F]+)\s*", value):
            wrong[name] = f"{name}={value!r} is not a number"
        elif name in WORDS and value.upper() not in WORDS[name] and not value.isdecimal():
            wrong[name] = f"{name}={value!r} is none of {', '.join(WORDS[name])}"
        elif name in FILES and not machine.path(value).is_file():
            wrong[name] = f"{name}={value!r} is not a file"
    if wrong:
        return problem("; ".join(wrong.values()), f"unset {' '.join(wrong)}")
    known = [name for name in machine.environment if name in (*NUMBERS, *WORDS, *FILES)]
    return ok(f"{len(known)} set, all of them legal") if known else skipped("none is set")


def transports(machine: Machine) -> Finding:
    """Switches that leave GPUs of one node nothing but the network, or that are costly and easily forgotten."""
    off = {
        name
        for name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
        if machine.environment.get(name) == "1"
    }
    if {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"} <= off:
        return problem(
            "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one node talk over the network",
            "unset NCCL_SHM_DISABLE",
        )
    if "NCCL_IB_DISABLE" in off and machine.rdma_devices:
        return problem("NCCL_IB_DISABLE=1, and there are RDMA devices", "unset NCCL_IB_DISABLE")
    if "NCCL_P2P_DISABLE" in off:
        return warning("NCCL_P2P_DISABLE=1: everything goes through the host's memory", "unset NCCL_P2P_DISABLE")
    return ok(f"{', '.join(sorted(off))} off") if off else skipped("none is set")
