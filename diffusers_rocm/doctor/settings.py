"""Static checks of environment variables that cannot work as they are set."""

import re
import shlex
from collections.abc import Mapping, Sequence

from .finding import Finding, ok, problem, skipped, warning
from .machine import Machine


# NCCL reads these as integers and passes over anything else; an empty one is as if it were not set.
NUMBERS = (
    "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_TIMEOUT",
    "NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_NTHREADS", "NCCL_BUFFSIZE", "NCCL_CUMEM_ENABLE",
    "NCCL_CUMEM_HOST_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_WIN_ENABLE", "NCCL_NSOCKS_PERTHREAD", "NCCL_SOCKET_NTHREADS",
    "NCCL_NET_GDR_READ", "NCCL_CROSS_NIC", "HSA_FORCE_FINE_GRAIN_PCIE", "HSA_NO_SCRATCH_RECLAIM",
    "GPU_MAX_HW_QUEUES", "HIP_FORCE_DEV_KERNARG",
)  # fmt: skip
# torch reads these, in any case, and fails at any other word (getCvarBool).
BOOLEANS = ("TORCH_NCCL_HIGH_PRIORITY",)
TRUTHS = ("y", "yes", "1", "t", "true", "n", "no", "0", "f", "false")
WORDS = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "ABORT", "TRACE"),
    "NCCL_P2P_LEVEL": ("LOC", "NVL", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS"),
    "NCCL_NET_GDR_LEVEL": ("LOC", "PIX", "PXB", "P2C", "PXN", "PHB", "NODE", "SYS"),
    "MIOPEN_FIND_MODE": ("NORMAL", "FAST", "HYBRID", "DYNAMIC_HYBRID", "TRUST_VERIFY", "TRUST_VERIFY_FULL"),
}
# Of collectives that are to be chosen from; recent NCCL fails where it does not know one.
CHOICES = {
    "NCCL_ALGO": ("Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "Simple"),
}
FAMILIES = ("AF_INET", "AF_INET6")
SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")
FILES = ("NCCL_TOPO_FILE", "NCCL_CONF_FILE", "NCCL_GRAPH_FILE", "NCCL_TUNER_CONFIG_FILE")


def chosen(value: str, names: Sequence[str]) -> list[str]:
    """The names that a list in NCCL's syntax lets through.

    Names are prefixes, with commas between; `=` in front makes them whole names, and `^` what is left out. A name, and
    a word of the list, may have a port: `mlx5_0:1`.
    """
    exclude, exact, words = _list(value)
    return [name for name in names if any(_matches(word, name, exact) for word in words) != exclude]


def idle(value: str, names: Sequence[str]) -> list[str]:
    """Words of such a list that let nothing through, though they should."""
    exclude, exact, words = _list(value)
    return [] if exclude else [word for word in words if not any(_matches(word, name, exact) for name in names)]


def _list(value: str) -> tuple[bool, bool, list[str]]:
    exclude, value = value.startswith("^"), value.removeprefix("^")
    exact, value = value.startswith("="), value.removeprefix("=")
    return exclude, exact, [word for word in value.split(",") if word]


def _matches(word: str, name: str, exact: bool) -> bool:
    (word, _, wanted), (name, _, port) = word.partition(":"), name.partition(":")
    return (name == word if exact else name.startswith(word)) and (not wanted or not port or wanted == port)


def integer(value: str) -> int:
    """As NCCL reads it, by C's strtoll: what begins like no number is 0, and what follows one does not count."""
    match = re.match(r"\s*([+-]?)(0[xX][0-9a-fA-F]+|\d+)", value)
    if match is None:
        return 0
    sign, digits = -1 if match[1] == "-" else 1, match[2]
    if digits.startswith("0") and digits[:2] not in ("0x", "0X"):
        octal = re.match("[0-7]+", digits)
        return sign * int(octal[0], 8)
    return sign * int(digits, 0)


def switched_off(environment: Mapping[str, str]) -> set[str]:
    """Those of NCCL's transports' switches that do switch off: 1 does, and for RDMA any number but 0."""
    values = {name: integer(environment.get(name, "")) for name in SWITCHES}
    return {name for name, value in values.items() if (value != 0 if name == "NCCL_IB_DISABLE" else value == 1)}


def socket_interfaces(machine: Machine) -> Finding:
    """Does what NCCL is told of interfaces leave one that works?"""
    value, names = machine.environment.get("NCCL_SOCKET_IFNAME"), machine.interfaces
    if not value or not names:
        return skipped("NCCL_SOCKET_IFNAME is not set" if not value else "interfaces are not readable")
    usable = machine.usable_interfaces
    found, fix = chosen(value, usable), f"export NCCL_SOCKET_IFNAME={_best(machine)}"
    if not found:
        return problem(f"NCCL_SOCKET_IFNAME={value} leaves none of {_usable(machine)}", fix)
    if missing := idle(value, usable):
        return warning(f"NCCL_SOCKET_IFNAME={value}: {', '.join(missing)} is none of {_usable(machine)}", fix)
    return ok(f"NCCL_SOCKET_IFNAME={value} is {', '.join(found)}")


def gloo_interfaces(machine: Machine) -> Finding:
    """Gloo takes whole names, each of which has to work."""
    value, names = machine.environment.get("GLOO_SOCKET_IFNAME"), machine.interfaces
    if not value or not names:
        return skipped("GLOO_SOCKET_IFNAME is not set" if not value else "interfaces are not readable")
    missing = [name for name in value.split(",") if name not in machine.usable_interfaces]
    if missing:
        return problem(
            f"GLOO_SOCKET_IFNAME={value}: {', '.join(map(repr, missing))} is none of {_usable(machine)}",
            f"export GLOO_SOCKET_IFNAME={_best(machine)}",
        )
    return ok(f"GLOO_SOCKET_IFNAME={value}")


def _usable(machine: Machine) -> str:
    return f"those that are up and have an address ({', '.join(machine.usable_interfaces) or 'none'})"


def _best(machine: Machine) -> str:
    """The interface that most likely goes out, as a word of a shell."""
    names = machine.usable_interfaces or machine.interfaces
    return shlex.quote(next((name for name in names if not re.match(r"lo$|docker|veth|br-|virbr", name)), names[0]))


def rdma_names(machine: Machine) -> Finding:
    """Does what NCCL is told of RDMA devices leave one that is there?"""
    value, names = machine.environment.get("NCCL_IB_HCA"), machine.rdma_ports or machine.rdma_devices
    if not value:
        return skipped("NCCL_IB_HCA is not set")
    if not names:
        return problem(
            f"NCCL_IB_HCA={value}, and there is no RDMA device", "unset NCCL_IB_HCA; ls /sys/class/infiniband"
        )
    found, fix = chosen(value, names), f"export NCCL_IB_HCA={shlex.quote(','.join(machine.rdma_devices))}"
    if not found:
        return problem(f"NCCL_IB_HCA={value} leaves none of {', '.join(names)}", fix)
    if missing := idle(value, names):
        return warning(f"NCCL_IB_HCA={value}: {', '.join(missing)} is none of {', '.join(names)}", fix)
    return ok(f"NCCL_IB_HCA={value} is {', '.join(found)}")


def rdma_gid(machine: Machine) -> Finding:
    """RoCE sends from an address out of a table; the entry that is asked for has to be one."""
    value = machine.environment.get("NCCL_IB_GID_INDEX", "")
    names = chosen(machine.environment.get("NCCL_IB_HCA") or "^", machine.rdma_ports)
    if not value.isdecimal() or not names:
        return skipped("NCCL_IB_GID_INDEX is not set" if names else "there are no RDMA devices")
    folders = {name: f"/sys/class/infiniband/{name.replace(':', '/ports/')}/gids" for name in names}
    empty = [name for name, folder in folders.items() if not (machine.read(f"{folder}/{value}") or "").strip("0:")]
    if empty:
        return problem(
            f"NCCL_IB_GID_INDEX={value} is empty on {', '.join(empty)}",
            "show_gids || grep . /sys/class/infiniband/*/ports/*/gids/*",
        )
    return ok(f"NCCL_IB_GID_INDEX={value}")


def values(machine: Machine) -> Finding:
    """Numbers, words and files that are none. A warning is of what NCCL passes over in silence."""
    wrong, without_effect = {}, {}
    for name, value in sorted(machine.environment.items()):
        if name in NUMBERS and value and not re.fullmatch(r"\s*-?(\d+|0[xX][0-9a-fA-F]+)\s*", value):
            wrong[name] = f"{name}={value!r} is not a number"
        elif name in BOOLEANS and value.lower() not in TRUTHS:
            wrong[name] = f"{name}={value!r} is none of {', '.join(TRUTHS)}"
        elif name in WORDS and value.upper() not in WORDS[name] and not value.isdecimal():
            wrong[name] = f"{name}={value!r} is none of {', '.join(WORDS[name])}"
        elif name in CHOICES and (unknown := _unknown(value, CHOICES[name])):
            wrong[name] = f"{name}={value!r}: {', '.join(unknown)} is none of {', '.join(CHOICES[name])}"
        elif name in FILES and not machine.path(value).is_file():
            wrong[name] = f"{name}={value!r} is not a file"
        elif name == "NCCL_SOCKET_FAMILY" and value not in FAMILIES:
            without_effect[name] = f"{name}={value!r} is none of {', '.join(FAMILIES)}"
        elif name == "NCCL_NET_PLUGIN":
            missing = [each for each in value.split(",") if "/" in each and not machine.path(each).is_file()]
            if missing:
                without_effect[name] = f"{name}: no file {', '.join(missing)}"
    fix = f"unset {' '.join([*wrong, *without_effect])}"
    if wrong:
        return problem("; ".join([*wrong.values(), *without_effect.values()]), fix)
    if without_effect:
        return warning(f"{'; '.join(without_effect.values())}: NCCL goes on without", fix)
    legal = (*NUMBERS, *BOOLEANS, *WORDS, *CHOICES, *FILES, "NCCL_SOCKET_FAMILY", "NCCL_NET_PLUGIN")
    known = [name for name in machine.environment if name in legal]
    return ok(f"{len(known)} set, all of them legal") if known else skipped("none is set")


def _unknown(value: str, words: Sequence[str]) -> list[str]:
    """Words that are none of these in `Ring,Tree;AllReduce:^NVLS`: lists, each of all collectives or of one."""
    lists = (part.rpartition(":")[2].removeprefix("^") for part in value.split(";"))
    given = (word for each in lists for word in each.split(",") if word)
    return [word for word in given if word.upper() not in map(str.upper, words)]


def transports(machine: Machine) -> Finding:
    """Switches that leave GPUs of one node nothing but the network, or that are costly and easily forgotten."""
    off, devices = switched_off(machine.environment), machine.rdma_devices
    if {"NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"} <= off:
        return problem(
            "NCCL_P2P_DISABLE=1 and NCCL_SHM_DISABLE=1: GPUs of one node talk over the network",
            "unset NCCL_SHM_DISABLE",
        )
    if machine.environment.get("NCCL_NET", "").upper() == "IB" and (not devices or "NCCL_IB_DISABLE" in off):
        why = "NCCL_IB_DISABLE=1" if devices else "there is no RDMA device"
        return problem(f"NCCL_NET=IB, and {why}", "unset NCCL_IB_DISABLE" if devices else "unset NCCL_NET")
    if "NCCL_IB_DISABLE" in off and devices:
        return problem("NCCL_IB_DISABLE=1, and there are RDMA devices", "unset NCCL_IB_DISABLE")
    if "NCCL_P2P_DISABLE" in off:
        return warning("NCCL_P2P_DISABLE=1: everything goes through the host's memory", "unset NCCL_P2P_DISABLE")
    numbers = {name: integer(machine.environment.get(name, "")) for name in SWITCHES}
    for name, number in numbers.items():
        if number != 0 and name not in off:
            return warning(
                f"{name}={number} switches nothing off: only 1 does", f"unset {name}  # or: export {name}=1"
            )
    return ok(f"{', '.join(sorted(off))} off") if off else skipped("none is set")
