"""What NCCL or RCCL wrote with `NCCL_DEBUG=INFO`: which transport each pair of ranks got, versions, warnings.

That a network was chosen ("Using network IB") proves nothing; the channel lines name what carries the data. RCCL
writes a device as its hexadecimal bus id and ends a line with the communicator, NCCL writes a decimal index (NCCL
src/transport/{net,p2p,shm}.cc).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .finding import Finding, ok, problem, warning


# So that the channel lines are there: they are not among recent NCCL's default subsystems.
DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM,GRAPH,ENV"}

CHANNEL = re.compile(
    # What stands before it, where a time may be too, is of no use here.
    r"\bNCCL\s+INFO\s+Channel\s+\d+(?:/\d+)?\s*:\s*(\d+)\[[0-9a-fA-F]+\]\s*->\s*(\d+)\[[0-9a-fA-F]+\]\s*"
    r"(?:\[(?:send|receive)\]\s*)?via\s+(P2P|SHM|NET)/(.+?)(?:\s+comm\s+\S+\s+nRanks\s+\d+)?\s*$"
)
VERSION = re.compile(r"\b([NR]CCL) version\s*:?\s*(\d+\.\S+)")
WARN = re.compile(r"\bNCCL WARN (.+?)\s*$")

# Builds that are known not to work, by the commit in their version.
KNOWN_BAD = {
    "96a25b5": "RCCL of ROCm 7.2.1: the first collective fails on Radeon cards (ROCm/legacy-rocm-build #6074)"
}

# RCCL's own words, misspelt there, by a part of them that a correction would leave.
_KNOWN_WARNINGS = (
    ('Missing "iommu=pt"', "the kernel's command line has no iommu=pt"),
    ("NUMA auto balancing", "NUMA balancing is on"),
    ("HSA_FORCE_FINE_GRAIN_PCIE", "HSA_FORCE_FINE_GRAIN_PCIE is not set"),
)


@dataclass(frozen=True)
class Channel:
    """One connection.

    Attributes:
        transport: `P2P`, `SHM`, or `NET/` and the network's name: `NET/IB`, `NET/Socket`.
        detail: the whole of it: `P2P/CUMEM/read`, `NET/IB/0/GDRDMA`.
    """

    sender: int
    receiver: int
    transport: str
    detail: str

    @property
    def is_rdma(self) -> bool:
        """Does a network carry it that can reach into the memory of GPUs?"""
        return self.transport.startswith("NET/") and self.transport != "NET/Socket"


@dataclass(frozen=True)
class DebugLog:
    """
    Attributes:
        library: `RCCL 2.27.7-HEAD:0d2c4fd`, or "" where the log does not say.
        warnings: in order, each once.
    """

    channels: tuple[Channel, ...]
    library: str
    warnings: tuple[str, ...]


def parse(text: str) -> DebugLog:
    """Lines that are none of these, or are cut off, are passed over."""
    channels, warnings, library = {}, {}, ""
    for line in text.splitlines():
        if match := CHANNEL.search(line):
            kind, rest = match[3], match[4]
            transport = f"NET/{rest.split('/')[0]}" if kind == "NET" else kind
            channels[Channel(int(match[1]), int(match[2]), transport, f"{kind}/{rest}")] = None
        elif match := WARN.search(line):
            known = [said for part, said in _KNOWN_WARNINGS if part in match[1]]
            warnings[known[0] if known else match[1]] = None
        elif match := VERSION.search(line):
            library = f"{match[1]} {match[2]}"
    return DebugLog(tuple(channels), library, tuple(warnings))


def telling_lines(text: str, clean: Callable[[str], str]) -> str:
    """Of the lines what `parse` reads, to be sent to another rank; a warning's own words are cleaned."""
    found = []
    for line in text.splitlines():
        if match := WARN.search(line):
            found.append(f"NCCL WARN {clean(match[1])}")
        elif match := CHANNEL.search(line) or VERSION.search(line):
            found.append(match[0])
    return "\n".join(found)


def known_bad(text: str) -> str:
    """Why the build that the text names is known not to work, or ""."""
    return next((why for commit, why in KNOWN_BAD.items() if commit in text), "")


def count_pairs(channels: Sequence[Channel]) -> str:
    """`P2P between 2 pair(s), NET/IB with GDRDMA between 1 pair(s)`"""
    indirect = pairs_without_gdrdma(channels)
    pairs: dict[str, set[frozenset[int]]] = {}
    for each in channels:
        pair = frozenset((each.sender, each.receiver))
        direct = f" {'without' if pair in indirect else 'with'} GDRDMA" if each.is_rdma else ""
        pairs.setdefault(each.transport + direct, set()).add(pair)
    return ", ".join(f"{transport} between {len(found)} pair(s)" for transport, found in sorted(pairs.items()))


def pairs_without_gdrdma(channels: Sequence[Channel]) -> set[frozenset[int]]:
    """Pairs whose RDMA goes through the host's memory both ways: sending alone does by default, without NVLink."""
    rdma = [each for each in channels if each.is_rdma]
    direct = {frozenset((each.sender, each.receiver)) for each in rdma if "/GDRDMA" in each.detail}
    return {frozenset((each.sender, each.receiver)) for each in rdma} - direct


def judge_transports(channels: Sequence[Channel], node_of: Mapping[int, int], rdma: bool, peers: bool) -> Finding:
    """What the channel lines of a working communicator say of the links.

    Args:
        node_of: by rank; a line of others is passed over.
        rdma: whether any node has RDMA devices.
        peers: whether the driver says that GPUs of one node can reach each other's memory.
    """
    channels = [each for each in channels if {each.sender, each.receiver} <= node_of.keys()]
    if not channels:
        return warning("the debug log has no channel line of these ranks", "NCCL_DEBUG=INFO diffusers-rocm doctor")
    seen = count_pairs(channels)
    inside = [each for each in channels if node_of[each.sender] == node_of[each.receiver]]
    across = [each for each in channels if node_of[each.sender] != node_of[each.receiver]]
    if any(each.transport == "NET/Socket" for each in across) and rdma:
        return problem(
            f"{seen}: nodes talk over TCP, and there are RDMA devices",
            "ibv_devinfo && NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,NET NCCL_IB_GID_INDEX=3 torchrun ... ; "
            "docker run --device /dev/infiniband --ulimit memlock=-1:-1 --network=host ...",
        )
    if any(each.transport.startswith("NET/") for each in inside):
        return problem(
            f"{seen}: GPUs of one node talk over the network", "unset NCCL_SHM_DISABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL"
        )
    if pairs_without_gdrdma(across):
        return warning(
            f"{seen}: through the host's memory",
            "sudo modprobe nvidia-peermem || sudo modprobe ib_peer_mem; export NCCL_NET_GDR_LEVEL=SYS",
        )
    if any(each.transport == "SHM" for each in inside) and peers:
        return warning(
            f"{seen}: through the host's memory, though the driver says that peers can reach each other",
            "unset NCCL_P2P_DISABLE; export NCCL_P2P_LEVEL=SYS",
        )
    return ok(seen)
