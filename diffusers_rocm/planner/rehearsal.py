"""One rank's forward without its GPU, its weights and the other ranks: what it would multiply, move, send and hold.

The model's own code runs, sharded and split as on any rank, on tensors that have shapes and no values, in a process
group that sends nothing. What is counted is therefore what will be done: there is no formula for a model here.
"""

import contextlib
import functools
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from diffusers import ModelMixin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.flop_counter import flop_registry

from ..benchmarks.collective_calls import collective_calls
from ..benchmarks.known_models import KnownModel, Size, cannot_be_had, inputs, kept_in_float32
from ..distributed import choices
from ..distributed.choices import Busy, is_known
from ..distributed.mesh import AXES
from ..hooks import step_graph
from ..models import modeling_utils
from ..models._modeling_parallel import ParallelConfig


ON_H200 = Busy.of_gpu(132)


@dataclass(frozen=True)
class Work:
    """One operation.

    Attributes:
        kind: `"matmul"`, `"attention"`, `"masked attention"`, or `"other"`, which reads and writes and little else.
        flops: of a multiplication and an addition, two.
        eager_bytes: read and written where each operation is a kernel.
        fused_bytes: the same where a compiler keeps what only neighbours read.
        shape: rows, columns and inner size of a product.
    """

    kind: str
    flops: int
    eager_bytes: int
    fused_bytes: int
    shape: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Exchange:
    """One collective.

    Attributes:
        kind: `"all-reduce"`, `"all-gather"`, `"all-to-all"`, `"broadcast"`, or `"hop"`, to one neighbour alone.
        axis: whose ranks take part.
        sent: bytes that this rank gives; of an all-reduce, and of a gather, the size of its own tensor.
        hidden: whether the rank goes on computing meanwhile.
    """

    kind: str
    axis: str
    sent: int
    hidden: bool


@dataclass
class Ledger:
    """What a forward of one rank does.

    Attributes:
        work, exchanges: each with how often.
        weights: bytes of its parameters and buffers.
        linears: of these, the bytes of Linears' weights, which can be had in 8 and 4 bits.
        activations: bytes of all else that it holds, at most at once.
        output: bytes of what the forward answers.
    """

    work: Counter[Work] = field(default_factory=Counter)
    exchanges: Counter[Exchange] = field(default_factory=Counter)
    weights: int = 0
    linears: int = 0
    activations: int = 0
    output: int = 0


def rehearse(
    known: KnownModel,
    size: Size,
    degrees: Mapping[str, int],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    rotate_method: str = "p2p",
    slow_links: bool = False,
    busy: Busy = ON_H200,
) -> Ledger:
    """Let the first rank of a mesh go through a forward that computes nothing.

    Args:
        degrees: ranks by axis; dp and cfg, which only repeat a forward, are left to the caller.
        config: what differs from the published model.
        slow_links: between the ranks, who then hide what they send where they can.
        busy: what keeps the GPU so.

    Raises:
        ValueError: the model cannot be had so: too few heads, no plan, no such config. As on real ranks.
    """
    world = math.prod(degrees.values())
    with ranks_that_are_not_there(world, slow_links):
        # In this order: agreements of the ranks need values, and weights and activations must have none.
        without_values = FakeTensorMode(allow_non_fake_inputs=True)
        with without_values:
            model = _build(known, config, dtype)
            given = inputs(known, size, model, dtype)
        names: dict[str, str] = {}
        if world > 1:
            model.enable_parallelism(config=ParallelConfig(**degrees, rotate_method=rotate_method))
            axes = model.parallelism.axes
            for name in ("model", "context", *AXES):  # an axis that is all of another has its group
                if (axis := getattr(axes, name)).size > 1:
                    names[axis.group.group_name] = name
        ledger = Ledger()
        held = [*model.parameters(), *model.buffers()]
        ledger.weights = sum(x.nbytes for x in held)
        ledger.linears = sum(each.weight.nbytes for each in model.modules() if isinstance(each, nn.Linear))
        noted = collective_calls(functools.partial(_note_exchange, ledger, names))
        # Tensors without values lie on the CPU.
        as_on_gpus = mock.patch.object(choices, "OF_CPU", busy)
        with as_on_gpus, without_values, torch.no_grad(), _Count(ledger, held) as count, noted:
            _repeat_equal_blocks(model, ledger)
            try:
                (output,) = model(**given)
            except Exception as error:
                if world > 1:  # what one rank can have, several can
                    raise
                raise cannot_be_had(known.cls, config, error) from error
        ledger.activations, ledger.output = count.most, output.nbytes
    return ledger


@contextlib.contextmanager
def ranks_that_are_not_there(world: int, slow_links: bool = False) -> Iterator[None]:
    """A process group of which this process is the first rank, and whose collectives send nothing.

    Raises:
        ValueError: there is a process group.
    """
    if dist.is_initialized():
        raise ValueError("a plan is made without a process group, and this process has one")
    hook = sys.excepthook  # which torch replaces by one that names the rank, for good
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        # What the ranks agree on by answers has none.
        answers = {
            "_weights_differ": lambda *_: False,
            "links_are_slow": lambda axis: slow_links and axis.size > 1,
            "gpus_of": lambda axis: (None, is_known(axis.device)),
        }
        hosts = mock.patch.object(step_graph, "of_hosts", lambda axis: replace(axis, device=torch.device("cpu")))
        with mock.patch.multiple(modeling_utils, **answers), hosts:
            yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook


def _build(known: KnownModel, config: Mapping[str, Any], dtype: torch.dtype) -> ModelMixin:
    """Raises ValueError: a config that its class does not take."""
    with _default(dtype), mock.patch.object(nn.Linear, "reset_parameters"):
        try:
            model = getattr(diffusers, known.cls)(**{**known.config, **config}).eval()
        except Exception as error:  # classes check little of their configs
            raise cannot_be_had(known.cls, config, error) from error
    for name in kept_in_float32(model):
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        module._parameters[attribute] = nn.Parameter(module._parameters[attribute].float(), requires_grad=False)
    return model.requires_grad_(False)


@contextlib.contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def rehearsed(make: Callable[[], nn.Module], run: Callable[[nn.Module], Any], dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the model that `make` makes, and of all else that is held at most while it runs, on one rank."""
    with _default(dtype), FakeTensorMode():
        model = make().eval()
        held = [*model.parameters(), *model.buffers()]
        with torch.no_grad(), _Count(Ledger(), held) as count:
            run(model)
    return sum(x.nbytes for x in held), count.most


_VIEWS = {"aten::_unsafe_view", "aten::lift_fresh", "aten::detach", "aten::_reshape_alias"}


class _Count(TorchDispatchMode):
    """Counts every operation, and the bytes of all tensors that are alive.

    What a compiler fuses is estimated: between two products, or attentions, all else is one kernel, that reads what it
    has not made itself and writes what others read later.
    """

    def __init__(self, ledger: Ledger, weights: list[Tensor]):
        super().__init__()
        self._ledger, self._live, self.most = ledger, 0, 0
        self._stretch = 0  # between two products
        self._made: dict[int, int] = {}  # storage that no kernel has written yet -> the stretch it was made in
        self._read: set[int] = set()  # storages that this stretch has read
        self._alive = {_storage(x): 0 for x in weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name
        taken = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        made = [x for x in tree_flatten(output)[0] if isinstance(x, Tensor)]
        for x in made:
            self._keep(x)
        if func.is_view or name in _VIEWS or not made:
            return output
        moved = sum(x.nbytes for x in (*taken, *made))
        if "convolution" in name:  # libraries lay what they read and write out another way
            self.most = max(self.most, self._live + moved)
        kind, flops, shape = _cost(func, name, taken, made, args, kwargs or {}, output)
        if kind == "other":
            fused = self._read_in_stretch(taken)
            self._made |= {_storage(x): self._stretch for x in made}
        else:
            fused = moved + self._written(taken)
            self._stretch += 1
            self._read.clear()
        self._ledger.work[Work(kind, flops, moved, fused, shape)] += 1
        return output

    def _keep(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self._live += storage.nbytes()
        self.most = max(self.most, self._live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self._live -= self._alive.pop(key, 0)
        self._made.pop(key, None)
        self._read.discard(key)

    def _written(self, taken: list[Tensor]) -> int:
        """Bytes that a kernel before has to write, now that somebody reads them."""
        return sum(x.nbytes for x in taken if self._made.pop(_storage(x), None) is not None)

    def _read_in_stretch(self, taken: list[Tensor]) -> int:
        bytes_moved = 0
        for x in taken:
            key = _storage(x)
            if self._made.get(key) == self._stretch or key in self._read:
                continue
            bytes_moved += self._written([x]) + x.nbytes
            self._read.add(key)
        return bytes_moved


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _cost(
    func: Any, name: str, taken: list[Tensor], made: list[Tensor], args: tuple, kwargs: dict, output: Any
) -> tuple[str, int, tuple[int, int, int] | None]:
    if "scaled_dot_product" in name:  # q [B, H, S, D], k [B, H, Sk, D]
        (batch, heads, rows, size), columns = taken[0].shape, taken[1].shape[2]
        masked = len(taken) > 3 and taken[3].dtype != torch.int64  # of a kernel's own random state
        flops = 2 * batch * heads * rows * columns * (size + taken[2].shape[3])
        return "masked attention" if masked else "attention", flops, None
    if func._overloadpacket not in flop_registry:
        return "other", 0, None
    flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=output)
    columns = made[0].shape[-1]
    rows = made[0].numel() // columns
    return "matmul", flops, (rows, columns, flops // (2 * rows * columns))


def _note_exchange(
    ledger: Ledger,
    names: Mapping[str, str],
    kind: str,
    sent: int,
    original: Callable[..., Any],
    *args: Any,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Nothing is sent."""
    if kind == "all-to-all":
        counts = args[3]
        kind = "hop" if len(counts) > 2 and sum(map(bool, counts)) == 1 else kind
    ledger.exchanges[Exchange(kind, names[group.group_name], sent, async_op)] += 1
    return mock.Mock() if async_op else None


def _repeat_equal_blocks(model: ModelMixin, ledger: Ledger) -> None:
    """Of blocks that are alike and are given alike, one is gone through, and counts for all."""
    for blocks in modeling_utils.outermost_lists(model):
        seen: dict[Any, tuple[Ledger, Any]] = {}
        for block in blocks:
            block.forward = functools.partial(_forward_once, block, block.forward, seen, ledger)


def _forward_once(
    block: nn.Module, forward: Callable[..., Any], seen: dict, ledger: Ledger, *args: Any, **kwargs: Any
) -> Any:
    leaves, structure = tree_flatten((args, kwargs))
    said = [(tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves]
    shapes = [(name, tuple(x.shape), x.dtype) for name, x in block.named_parameters()]
    key = repr((type(block), said, str(structure), shapes))
    if key not in seen:
        before = Ledger(ledger.work.copy(), ledger.exchanges.copy())
        output = forward(*args, **kwargs)
        seen[key] = (
            Ledger(ledger.work - before.work, ledger.exchanges - before.exchanges),
            tree_map_only(Tensor, lambda x: (x.shape, x.dtype), output),
        )
        return output
    delta, shape = seen[key]
    ledger.work.update(delta.work)
    ledger.exchanges.update(delta.exchanges)
    return _like(shape)


def _like(shape: Any) -> Any:
    if isinstance(shape, tuple) and len(shape) == 2 and isinstance(shape[0], torch.Size):
        return torch.empty(shape[0], dtype=shape[1])
    if isinstance(shape, (list, tuple)):
        return type(shape)(map(_like, shape))
    if isinstance(shape, dict):
        return {key: _like(item) for key, item in shape.items()}
    return shape
