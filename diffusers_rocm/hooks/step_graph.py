"""A denoiser's whole step, captured once and replayed: the host launches one graph in place of thousands of kernels.

CUDA graphs; on ROCm, HIP graphs are behind the same functions of torch.
"""

import copy
import enum
import functools
import logging
import numbers
import operator
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ..distributed import graph_memsets, host_memory
from ..distributed.agreement import fail_together
from ..distributed.axis import Axis
from ..distributed.choices import goes_through_host, memsets_become_kernels
from ..distributed.collectives import all_gather_int64
from ..distributed.graph_calls import call_of_a_graph, current_call
from ..distributed.links import reaches_host
from ..distributed.mesh import of_hosts
from ..distributed.peer_memory import forget_places
from ..distributed.quantized import is_quantized, parts
from .around_call import AroundCall
from .group_offload import is_offloaded


logger = logging.getLogger(__name__)

# Calls that come first: the libraries choose their kernels, process groups connect, the compiler compiles.
WARM_UP = 2
# Of so many kinds of calls (shapes, prompts' lengths) the graphs are kept.
KEPT = 4
# Of so many calls one after another none was a graph's: it is said.
PATIENCE = KEPT * (WARM_UP + 1)
# Besides tensors, what a call can be told by: objects may change, or another take their place.
PLAIN = (type(None), numbers.Number, str, enum.Enum, torch.dtype, torch.device, torch.Size)


def record(call: Callable[[], Any], device: torch.device, pool: Any) -> tuple[Callable[[], None], Any, Any]:
    """Capture what `call()` launches: what replays it, its answer, which each replay fills anew, and its memory."""
    by_kernels = memsets_become_kernels(device)
    graph = torch.cuda.CUDAGraph(keep_graph=by_kernels)
    # Process groups watch their work from threads of their own, which a capture would forbid otherwise.
    with torch.cuda.device(device):
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            answer = call()
        if by_kernels:
            current = current_call()
            if current is not None and current.by_copies:
                graph_memsets.become_kernels(graph.raw_cuda_graph(), torch.cuda.current_device())
            graph.instantiate()
    return graph.replay, answer, graph.pool()


_graphs: "weakref.WeakSet[StepGraph]" = weakref.WeakSet()


def wrap_destroy_process_group(original: Callable) -> Callable:
    """A group waits for ever for graphs that captured its collectives: they go first.

    Those of other groups stay. Ranks that are not of this one keep theirs, and all must replay alike.
    """

    @functools.wraps(original)
    def destroy_process_group(group: dist.ProcessGroup | None = None) -> None:
        last = group is None or group == dist.group.WORLD
        if last or isinstance(group, dist.ProcessGroup):  # of which this rank is
            for graph in _graphs:
                if last or graph.sends_over(group):
                    graph.forget()
            for forget in (forget_places, host_memory.forget):
                forget(None if last else group)
        original(group)

    return destroy_process_group


@dataclass
class _Kind:
    """Calls whose arguments differ in the values of tensors alone."""

    spec: TreeSpec
    described: list[Any]
    calls: int = 0
    inputs: list[Tensor] = field(default_factory=list)  # what the graph reads
    answer: Any = None
    replay: Callable[[], None] | None = None

    @functools.cached_property
    def digest(self) -> int:
        """A number that tells it from others, the same on all ranks."""
        return zlib.crc32(repr((self.spec, self.described)).encode())

    def step(self, leaves: list[Any]) -> Any:
        """Replay with these arguments: an answer of its own, which the GPU has yet to make."""
        tensors = (x for x in leaves if isinstance(x, Tensor))
        for static, x in zip(self.inputs, tensors, strict=True):
            static.copy_(x, non_blocking=True)
        self.replay()
        return tree_map_only(Tensor, torch.clone, self.answer)


class StepGraph(AroundCall):
    """Hangs on a model, innermost: what ranks compare and exchange around its call stays outside of the graph. It goes
    when the model is no longer parallel.

    All ranks hang it alike: they try whether messages can go by copies, which they do from then on. Blocks
    are compiled after, not before. Calls that require gradients run as ever. Another kind of call has a graph of its
    own; when on one rank or all a weight lies elsewhere than before, or modules are others, all graphs are made anew.
    Hooks that come later, and attributes that are neither, change nothing in a graph.

    Raises:
        ValueError: the model's steps are a graph already.

    Raises (its calls):
        ValueError: the model does something that no graph can hold: adapters beside layers, weights that come for
            their layer alone, caches, values that are read on the host; or is given objects whose state no one sees.
        RuntimeError: another rank could not capture a step; says which, and why.
        ValueError: the ranks are called differently, or the model was moved on some of them alone.
    """

    def __init__(self, model: nn.Module):
        if any(isinstance(each, StepGraph) for each in vars(model).get("around_call", ())):
            raise ValueError(f"the steps of this {type(model).__name__} are a graph already: remove() it, or keep it")
        super().__init__(model)
        model.around_call.insert(0, model.around_call.pop())
        self.forget()
        _graphs.add(self)
        parallelism = getattr(model, "parallelism", None)
        self._split, self._slices = getattr(parallelism, "split", None), getattr(parallelism, "slices", None)
        self._sharing = of_hosts(Axis.single("model") if parallelism is None else parallelism.axes.model)
        self._in_vain = 0
        self._siblings = [] if parallelism is None else parallelism.hooks
        self._siblings.append(self)
        if parallelism is not None:
            for axis in (parallelism.axes.ring, parallelism.axes.ulysses, parallelism.axes.tp):
                if goes_through_host(axis):
                    reaches_host(axis)
        if self._slices is not None:
            self._slices.by_copies(True)
        compiled = any(module._compiled_call_impl is not None for module in model.modules())
        if self._split is not None and self._split.by_copies(True) and compiled and self._split.cp.rank == 0:
            logger.warning(
                f"the blocks of this {type(model).__name__} were compiled before its steps are graphs: compile them "
                "after, so that they compute beside their messages"
            )

    def __deepcopy__(self, memo: dict) -> "StepGraph":
        """Of the copied model: its weights lie elsewhere, and it has no graph yet."""
        other = memo[id(self)] = object.__new__(StepGraph)
        other.forget()
        vars(other).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items() if name not in vars(other)})
        _graphs.add(other)
        return other

    def forget(self) -> None:
        """Let the graphs go, and the memory that they hold, of weights that have gone elsewhere, too."""
        self._kinds: list[_Kind] = []
        self._fixed: _Fixed | None = None
        self._pool = None

    def sends_over(self, group: dist.ProcessGroup) -> bool:
        """Whether the model's messages may go by a group."""
        return group in self._groups()

    def _groups(self) -> list[dist.ProcessGroup]:
        parallelism = getattr(self._module, "parallelism", None)
        axes = [] if parallelism is None else vars(parallelism.axes).values()
        return [axis.group for axis in axes if axis.group is not None]

    def before_moving(self) -> None:
        self.forget()

    def remove(self) -> None:
        if self in self._siblings:  # unless the model is what removes it
            self._siblings.remove(self)
        self.forget()
        if self._split is not None:
            self._split.by_copies(False)
        if self._slices is not None:
            self._slices.by_copies(False)
        _graphs.discard(self)
        for group in self._groups():
            if not any(graph.sends_over(group) for graph in _graphs):
                forget_places(group)
                host_memory.forget(group)
        super().remove()

    @property
    def captured(self) -> bool:
        """Whether there is a graph."""
        return any(kind.replay is not None for kind in self._kinds)

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        if torch.is_grad_enabled():
            self._count("gradients are enabled: call it under torch.no_grad()")
            return call(*args, **kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        kind = self._kind(spec, leaves)
        replayed = kind.replay is not None
        answer = kind.step(leaves) if replayed else None
        # Asked while the GPU has something to do. What all ranks have replayed in vain has done no harm; where some of
        # them have not, all raise, and the others' GPUs wait until their processes end.
        if not self._is_as_it_was(kind):
            self.forget()
            self._fixed = _Fixed(self._module)
            kind = self._kind(spec, leaves)
            self._count("its modules, or where its weights and buffers are, change from call to call")
        elif replayed:
            self._in_vain = 0
            return answer
        else:
            self._count(f"its calls are of more kinds than {KEPT}, as by a number that is another in each")
        kind.calls += 1
        if self._slices is not None:
            self._slices.look()
        if kind.calls <= WARM_UP:
            with call_of_a_graph(captured=False):
                return call(*args, **kwargs)
        try:
            with fail_together(f"capture a step of this {type(self._module).__name__}", self._sharing):
                self._capture(kind, call, leaves)
        except Exception:
            self.forget()  # on all ranks: a graph of some of them would wait for the others
            raise
        self._in_vain = 0
        return kind.step(leaves)

    def _is_as_it_was(self, kind: _Kind) -> bool:
        """Whether the model is on all ranks, who all ask: what one launches as ever and others replay is not met.

        Raises:
            ValueError: the ranks are called differently, or do not have the same graphs.
        """
        own = torch.tensor([kind.digest, kind.calls, self._fixed is not None and self._fixed.holds()])
        by_rank = all_gather_int64(own, self._sharing)
        if (by_rank[:, :2] != by_rank[0, :2]).any():
            said = [f"call {calls + 1} of kind {digest:08x}" for digest, calls, _ in by_rank.tolist()]
            shown = ", ".join(f"rank {rank}: {each}" for rank, each in zip(self._sharing.ranks(), said, strict=True))
            raise ValueError(
                f"the ranks of this {type(self._module).__name__} are not at the same call ({shown}): give all of "
                "them the same shapes and numbers, and move the model on all or none"
            )
        return bool(by_rank[:, 2].min())

    def _count(self, reason: str) -> None:
        """Say once that there is no graph, if it goes on."""
        self._in_vain += 1
        if self._in_vain == PATIENCE and self._sharing.rank == 0:
            logger.warning(f"{PATIENCE} calls of this {type(self._module).__name__} were no graph: {reason}")

    def _kind(self, spec: TreeSpec, leaves: list[Any]) -> _Kind:
        device = next(self._module.parameters()).device.type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        described = [autocast, *map(self._describe, leaves)]
        found = next((each for each in self._kinds if each.described == described and each.spec == spec), None)
        others = [each for each in self._kinds if each is not found]
        if found is None and len(others) == KEPT and others[0].replay is not None:
            logger.info(f"the oldest graph of this {type(self._module).__name__} goes: {KEPT} kinds of calls are kept")
        self._kinds = [*others[1 - KEPT :], found or _Kind(spec, described)]  # the one used last is last
        return self._kinds[-1]

    def _describe(self, leaf: Any) -> tuple:
        """What of an argument makes it another kind of call, alike on all ranks."""
        if isinstance(leaf, Tensor):
            return Tensor, leaf.shape, leaf.dtype
        if not isinstance(leaf, PLAIN):
            raise ValueError(
                f"a {type(leaf).__name__} is given to this {type(self._module).__name__}, and what it holds may be "
                "other in each step: leave graphs out"
            )
        return type(leaf), leaf

    def _capture(self, kind: _Kind, call: Callable, leaves: list[Any]) -> None:
        model, name = self._module, type(self._module).__name__
        for path, module in model.named_modules():
            if hasattr(module, "lora_A"):
                raise ValueError(
                    f"{path} of this {name} has an adapter beside it: fuse and unload adapters, or leave graphs out"
                )
            if hasattr(getattr(module, "processor", None), "scale"):
                raise ValueError(f"the scale of the IP-Adapter of this {name} would be fixed: leave graphs out")
            if is_offloaded(module) or module is not model and hasattr(module, "_hf_hook"):
                raise ValueError(f"the layers of this {name} are brought to the device one by one: leave graphs out")
        if getattr(model, "is_cache_enabled", False):
            raise ValueError(f"this {name} has a cache, which decides on the host: disable_cache(), or no graphs")
        device = next(model.parameters()).device
        with torch.inference_mode(False):
            kind.inputs = [torch.zeros_like(x, device=device) for x in leaves if isinstance(x, Tensor)]
        statics = iter(kind.inputs)
        given = [next(statics) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = tree_unflatten(given, kind.spec)
        try:
            with call_of_a_graph(captured=True):
                kind.replay, kind.answer, self._pool = record(lambda: call(*args, **kwargs), device, self._pool)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"a step of this {name} cannot be captured, leave graphs out: {reason}") from error
        unknown = next((x for x in tree_leaves(kind.answer) if not isinstance(x, (Tensor, *PLAIN))), None)
        if unknown is not None:
            raise ValueError(f"this {name} answers a {type(unknown).__name__}, which no graph can: leave graphs out")


class _Fixed:
    """What a graph takes for granted: modules, processors and forwards, and where weights and buffers are.

    Their memory is kept, so that a replay can come before the question whether all is as it was. That is asked of
    thousands, in loops that are not Python's own, and takes the host longer than the launch; a rank that is late has
    the others wait.
    """

    def __init__(self, model: nn.Module):
        fixed: list[tuple[dict, str, Any]] = []
        self._whole: list[dict] = []
        for module in model.modules():
            whole = (module._modules, module._parameters, module._buffers)
            fixed += [(each, name, x) for each in whole for name, x in each.items()]
            # Offloading and caches replace a forward.
            fixed += [(vars(module), name, vars(module).get(name)) for name in ("processor", "forward")]
            self._whole += whole
        self._dicts, self._names, self._values = zip(*fixed, strict=True)
        self._sizes = list(map(len, self._whole))
        tensors = [x for x in self._values if isinstance(x, Tensor)]
        self._plain = [x for x in tensors if not is_quantized(x)]
        self._quantized = [x for x in tensors if is_quantized(x)]
        self._addresses = self._found()
        self._memory = [part.untyped_storage() for x in tensors for part in parts(x).values()]

    def holds(self) -> bool:
        return (
            all(map(operator.is_, map(dict.get, self._dicts, self._names), self._values))
            and list(map(len, self._whole)) == self._sizes
            and self._found() == self._addresses
        )

    def _found(self) -> list[int]:
        of_quantized = (part.data_ptr() for x in self._quantized for part in parts(x).values())
        return [*map(Tensor.data_ptr, self._plain), *of_quantized]
