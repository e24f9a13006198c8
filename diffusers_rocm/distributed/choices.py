"""How messages go by what an axis is like: what links and GPUs decide is chosen here, and why.

What is known of them is measured when a model is enabled, or made a graph (`links`, which says what came of it), and
is the same on all ranks. What is about how GPUs of one kind begin what they are given is for those (`is_known`); on
others messages go as they come, beside what is computed if links are slow, and by copies where these are timed.
Whatever is chosen, the answer is the same, but for rounding; what each gave is in docs/performance.md. How short a
message is left whole, or exact, stands where it is made. Kernels of attention are chosen in
`models/attention_kernels`.
"""

from dataclasses import dataclass

import torch

from .axis import Axis
from .compression import EXACT


def computes_beside(*axes: Axis) -> bool:
    """Whether compiled blocks compute beside their messages, and wait late.

    Over fast links a kernel of NCCL takes more from what is beside it, by the multiprocessors that it occupies, than
    it hides; a copy out of another rank's memory takes none.
    """
    return any(axis.slow_links or axis.peer_memory for axis in axes)


def is_known(device: torch.device) -> bool:
    """Whether a GPU is of the kind on which all of this was measured: H100 and H200, and what has their capability.

    CPUs do as those, that it can be tried on them.
    """
    if device.type == "cpu":
        return True
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) == (9, 0)


def begins_early(axis: Axis) -> bool:
    """Whether what is computed is held until a message has begun, and others begin before it has come: where compiled.

    A kernel that fills the GPU keeps a message out to its own end. Copies begin by themselves.
    """
    return axis.slow_links and axis.known_gpus and torch.compiler.is_compiling()


def goes_by_copies(axis: Axis) -> bool:
    """Whether messages are fetched out of the other ranks' memory: in graphs alone, and if it is reached.

    Without a graph each copy costs the host a launch. 8 bits save nothing over fast links, and were not tried so. What
    is not as long on all ranks goes by the group, but for a ring's hops, and so does what a ring gathers some heads at
    a time.
    """
    return axis.known_gpus and not axis.slow_links and axis.communication == EXACT


def goes_through_host(axis: Axis) -> bool:
    """Whether messages are copied through the host's memory in graphs, if that works.

    Without peer access NCCL's go there too, by kernels, which take multiprocessors, and come late where none are free.
    """
    return axis.slow_links


def goes_in_groups(axis: Axis) -> bool:
    """Whether Ulysses sends a long sequence a group of heads at a time, each beside the attention of the one before.

    Over fast links that costs more than it hides, too, and a kernel of few heads has a longer tail.
    """
    return axis.slow_links


def goes_in_halves(heads: int, axis: Axis) -> bool:
    """Whether Ulysses sends half of so many heads at a time, where a sequence is too short for groups: compiled.

    The attention of a half is beside messages of the other.
    """
    return begins_early(axis) and heads >= 2 * axis.size


def goes_by_gather(axis: Axis) -> bool:
    """Whether two ranks exchange by a gather, by which as many bytes go in less time; Gloo's takes twice as long."""
    return axis.size == 2 and axis.slow_links and axis.known_gpus and axis.device.type != "cpu"


def memsets_become_kernels(device: torch.device) -> bool:
    """Whether short memsets of a graph are made kernels, if its messages are copies.

    Between kernels of a graph of several streams a memset takes longer. In one of a single stream nothing is gained.
    """
    return is_known(device)


def gelu_is_in_products(tp: Axis, *axes: Axis) -> bool:
    """Whether compiled blocks have gelu in the product before it (`fused_gelu`): of sequences split over `axes`.

    Over slow links, and of a product that is one rank's part, it was not measured.
    """
    return tp.size == 1 and all(axis.known_gpus and not axis.slow_links for axis in axes)


@dataclass(frozen=True)
class Busy:
    """What keeps a device busy: less of it is not worth a message of its own.

    Attributes:
        rows: of queries, counted in every head, of one kernel.
        products: of an element of a query and one of a key, counted in every head, of one hop of a ring.
    """

    rows: int
    products: int

    @classmethod
    def of_gpu(cls, multiprocessors: int) -> "Busy":
        """Measured where there are 132 of them (docs/performance.md); a larger GPU asks no more of a hop."""
        return cls(496 * multiprocessors, (1 << 27) * min(multiprocessors, 132))


OF_CPU = Busy(16, 64)


@torch.compiler.assume_constant_result
def _busy(device_type: str, count: int | None) -> Busy:
    """What keeps a device busy: the one of so many multiprocessors; if not known, that of this process."""
    if device_type == "cpu":
        return OF_CPU
    return Busy.of_gpu(count or multiprocessors(torch.device(device_type)))


def groups_of_heads(heads: int, rows: int, device: torch.device, axis: Axis) -> int:
    """Into how many groups so many heads, of so many rows each, are cut; the same on all ranks of the axis."""
    return -(-heads // -(-_busy(device.type, axis.multiprocessors).rows // rows))


def hides_a_hop(rows: int, keys: int, size: int, device: torch.device, axis: Axis) -> bool:
    """Whether attention of so many rows, in all heads of `size`, to the keys of one rank is worth a hop beside it."""
    return rows * keys * size >= _busy(device.type, axis.multiprocessors).products


def multiprocessors(device: torch.device) -> int | None:
    """Of a GPU, 132 where torch does not say; None for a CPU."""
    if device.type == "cpu":
        return None
    return getattr(torch.get_device_module(device).get_device_properties(device), "multi_processor_count", 132)
