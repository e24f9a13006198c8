"""Memsets of a captured graph, made kernels.

Libraries clear the counters of their kernels by memsets of some bytes, one before each attention and before many
products. Between two kernels of a graph that takes longer than a kernel that writes as much, above all in a graph of
several streams ("Memsets between kernels" in docs/performance_trials.md).
"""

import ctypes
import functools
import logging

from .cuda_driver import call


logger = logging.getLogger(__name__)

# Bytes; what is longer stays a memset, since one block of threads would write it for long.
LONGEST = 1 << 16

_THREADS = 256

# `CUgraphNodeType`.
_MEMSET = 2

# Writes `words` words of 4 bytes.
_PTX = b"""
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill_for_memset(.param .u64 place, .param .u32 words, .param .u32 value)
{
    .reg .pred %done;
    .reg .b32 %index, %words, %value, %threads;
    .reg .b64 %place, %word;
    ld.param.u64 %place, [place];
    ld.param.u32 %words, [words];
    ld.param.u32 %value, [value];
    cvta.to.global.u64 %place, %place;
    mov.u32 %index, %tid.x;
    mov.u32 %threads, %ntid.x;
next:
    setp.ge.u32 %done, %index, %words;
    @%done bra end;
    mul.wide.u32 %word, %index, 4;
    add.s64 %word, %word, %place;
    st.global.u32 [%word], %value;
    add.u32 %index, %index, %threads;
    bra next;
end:
    ret;
}
"""


class _Memset(ctypes.Structure):
    """CUDA's `CUDA_MEMSET_NODE_PARAMS`."""

    _fields_ = (
        ("place", ctypes.c_uint64),
        ("pitch", ctypes.c_size_t),
        ("value", ctypes.c_uint32),
        ("element_size", ctypes.c_uint32),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )

    def words(self) -> int:
        """Of 4 bytes, which one kernel is to write; 0 where it is to stay a memset."""
        size = self.width * self.element_size
        fits = self.height == 1 and size <= LONGEST and size % 4 == 0 and self.place % 4 == 0
        return size // 4 if fits else 0

    def word(self) -> int:
        """What each of them is to be."""
        element = self.value.to_bytes(4, "little")[: self.element_size]
        return int.from_bytes(element * (4 // self.element_size), "little")


class _Kernel(ctypes.Structure):
    """CUDA's `CUDA_KERNEL_NODE_PARAMS_v1`."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p),
    )


@functools.cache
def _fill(device: int) -> ctypes.c_void_p:
    """The kernel, of this device, which is the current one."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), _PTX)
    call("cuModuleGetFunction", ctypes.byref(function), module, b"fill_for_memset")
    return function


def _nodes(function: str, of: ctypes.c_void_p) -> ctypes.Array:
    """Those that a function answers of a graph, or of one of its nodes."""
    count = ctypes.c_size_t()
    call(function, of, None, ctypes.byref(count))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:
        call(function, of, nodes, ctypes.byref(count))
    return nodes


def become_kernels(graph: int, device: int) -> int:
    """Replace short memsets of a graph (`raw_cuda_graph`), before it is instantiated; the log says what is in the way.

    What writes memory of another device, or is in a graph within the graph, is not looked for: a step has none.

    Returns:
        How many are replaced.

    Raises:
        AssertionError: the driver has added a kernel, and neither joins it with the others nor takes it back.
    """
    replaced, refused = 0, None
    try:
        handle = ctypes.c_void_p(graph)
        for node in map(ctypes.c_void_p, _nodes("cuGraphGetNodes", handle)):
            try:
                replaced += _become_kernel(handle, node, device)
            except RuntimeError as error:
                refused = error
    except (OSError, RuntimeError) as error:
        refused = error
    if refused is not None:
        logger.info(f"{replaced} memsets of a step are kernels, others stay: {refused}")
    return replaced


def _become_kernel(graph: ctypes.c_void_p, node: ctypes.c_void_p, device: int) -> bool:
    """Replace a node, if it is a short memset."""
    kind, memset = ctypes.c_int(), _Memset()
    call("cuGraphNodeGetType", node, ctypes.byref(kind))
    if kind.value != _MEMSET:
        return False
    call("cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
    if not memset.words():
        return False
    before, after = _nodes("cuGraphNodeGetDependencies", node), _nodes("cuGraphNodeGetDependentNodes", node)
    values = ctypes.c_uint64(memset.place), ctypes.c_uint32(memset.words()), ctypes.c_uint32(memset.word())
    parameters = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
    kernel, added = _Kernel(_fill(device), (1, 1, 1), (_THREADS, 1, 1), 0, parameters, None), ctypes.c_void_p()
    count = ctypes.c_size_t(len(before))
    call("cuGraphAddKernelNode", ctypes.byref(added), graph, before, count, ctypes.byref(kernel))
    try:
        if len(after):
            added_each = (ctypes.c_void_p * len(after))(*[added.value] * len(after))
            call("cuGraphAddDependencies", graph, added_each, after, ctypes.c_size_t(len(after)))
    except RuntimeError:
        _take_back(added)
        raise
    call("cuGraphDestroyNode", node)  # where that is refused both write the same, before all that follows
    return True


def _take_back(added: ctypes.c_void_p) -> None:
    """What nobody waits for would write too late."""
    try:
        call("cuGraphDestroyNode", added)
    except RuntimeError as error:
        raise AssertionError(f"a graph has a kernel that nothing waits for: {error}") from error
