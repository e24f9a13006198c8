"""Shares the branches of classifier-free guidance (Ho and Salimans, 2022) between groups of ranks.

Pipelines run the branches in two ways. Those that stack them call the denoiser once a step: each group takes its rows
of the batch. Those that call it once for each branch: the groups take turns, and the call whose turn is another
group's is answered at once by tensors that are yet to come. With the last call all predictions are exchanged. Whoever
reads one before that gets an error: every answer is what the denoiser says to that very input, or none.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..distributed.agreement import ROUNDING
from ..distributed.agreement import leaves as named_leaves
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather, all_gather_int64
from ..distributed.sharding import Block
from .around_call import AroundCall
from .caches import guidance_shared
from .context_parallel import may_be_cached


class _Turns:
    """Calls that are answered together; shared by the tensors that wait for it."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size
        self.filled = False

    def too_early(self, what: str) -> ValueError:
        return ValueError(
            f"the pipeline used a prediction of {self.name} ({what}) before it had called it {self.size} times: it "
            f"runs no guidance, has fewer than {self.size} branches (most have 2), or works on one before the next; "
            "use dp, ulysses or tp in place of cfg"
        )


# What may be asked of a tensor that is yet to come: nothing of its values.
_ABOUT = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "nbytes")
} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.is_contiguous, Tensor.ndimension, Tensor.nelement, Tensor.element_size, Tensor.storage_offset,
}  # fmt: skip


class Pending(Tensor):
    """A prediction that is yet to come; views of it are made at once, and anything else when it is there."""

    turns: _Turns

    @staticmethod
    def of(x: Tensor, turns: _Turns) -> "Pending":
        pending = x.as_subclass(Pending)
        pending.turns = turns
        return pending

    @classmethod
    def __torch_function__(cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        waiting = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pending) and not x.turns.filled]
        with torch._C.DisableTorchFunctionSubclass():
            args, kwargs = tree_map(_plain, (args, kwargs))
            if not waiting or func in _ABOUT:
                return func(*args, **kwargs)
            plain = [_plain(x) for x in waiting]
            versions = [x._version for x in plain]
            result = func(*args, **kwargs)
            leaves, storages = tree_leaves(result), {x.untyped_storage().data_ptr() for x in plain}
            views = all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in storages for x in leaves)
            if not views or not leaves or versions != [x._version for x in plain]:
                raise waiting[0].turns.too_early(getattr(func, "__name__", str(func)))
            return tree_map(lambda x: Pending.of(x, waiting[0].turns), result)


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Pending) else x


class GuidanceParallel(AroundCall):
    """Around a denoiser whose calls are shared by the ranks of the cfg axis.

    A batch that divides by the axis is split; the calls of any other take turns. What a call of some shape answers is
    learned the first time, when every group runs it: that whose rows depend on each other, as branches of perturbed
    attention do, cannot be split. Set `check` to False to leave that out of a batch, for which it takes the memory of
    all rows; it is left out of a model with caches, whose state it would change.

    Raises:
        ValueError: a prediction that was read too early, as is the case without guidance; rows that depend on each
            other; gradients.
    """

    def __init__(self, model: nn.Module, axis: Axis):
        super().__init__(model)
        self._name, self._axis, self.check = type(model).__name__, axis, True
        self._split_before: set[str] = set()  # kinds of calls
        self._known: dict[str, tuple[list[tuple[torch.Size, torch.dtype, torch.device]], Any]] = {}
        self.begin_run()

    def begin_run(self) -> None:
        """Forget calls whose others never came: their run was interrupted."""
        self._turns = _Turns(self._name, self._axis.size)
        self._parts: list[list[Tensor]] = []

    def end_step(self) -> None:
        """Raises ValueError where the step had fewer calls than there are groups."""
        if self._parts:
            self._parts = []
            raise self._turns.too_early("a step of the scheduler")

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        early = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pending) and not x.turns.filled]
        if early:
            raise early[0].turns.too_early("another call")
        args, kwargs = tree_map(_plain, (args, kwargs))
        everything = itertools.chain(self._module.parameters(), tree_leaves((args, kwargs)))
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in everything):
            raise ValueError(f"cfg={self._axis.size} shares predictions, not gradients: run under torch.no_grad()")
        batch = _batch_of((*args, *kwargs.values()))
        try:
            if batch % self._axis.size == 0:
                return self._split(call, args, kwargs, batch)
            return self._take_turns(call, args, kwargs)
        except BaseException:
            self.begin_run()
            raise

    def _split(self, call: Callable, args: tuple, kwargs: dict, batch: int) -> Any:
        start, stop = Block(batch, 1).bounds(self._axis.rank, self._axis.size)
        kind, expected = _kind(args, kwargs) if self.check else "", None
        if self.check and kind not in self._split_before and not any(map(may_be_cached, self._module.modules())):
            expected = tree_leaves(call(*args, **kwargs))
        args = tuple(_rows(x, "", batch, start, stop) for x in args)
        kwargs = {name: _rows(x, name, batch, start, stop) for name, x in kwargs.items()}
        with guidance_shared(self._axis, by_rows=True):
            leaves, structure = tree_flatten(call(*args, **kwargs))
        sizes = (stop - start,) * self._axis.size
        gathered = [self._gathered(x, sizes) for x in leaves]
        if expected is not None:
            self._split_before.add(kind)
            self._compare(gathered, expected)
        return tree_unflatten(gathered, structure)

    def _compare(self, parts: list[Any], whole: list[Any]) -> None:
        """Each group has the same parts, but computed the whole by itself: what one of them finds, all raise."""
        apart, worst = False, 0.0
        for x, y in zip(parts, whole, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point() and torch.isfinite(y).all():
                error = ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item()
                apart |= not error <= (1e-3 if x.dtype == torch.float32 else ROUNDING)
                worst = max(worst, error)
        if all_gather_int64(torch.tensor([apart]), self._axis).any():
            raise ValueError(
                f"{self._name} answers a part of its rows otherwise than all of them (relative error {worst:.1e}), so "
                f"they cannot be shared by cfg={self._axis.size}; use dp, ulysses or tp in its place"
            )

    def _gathered(self, x: Any, sizes: tuple[int, ...]) -> Any:
        if not isinstance(x, Tensor):
            return x
        if x.ndim == 0 or x.shape[0] != sizes[0]:
            raise ValueError(
                f"{self._name} answers {[*x.shape]} to {sizes[0]} rows, so that they cannot be shared by cfg="
                f"{self._axis.size}; use dp, ulysses or tp in its place"
            )
        return all_gather(x, sizes, self._axis, 0)

    def _take_turns(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        kind, turn, turns = _kind(args, kwargs), len(self._parts), self._turns
        known = self._known.get(kind)
        if known is None or turn == self._axis.rank:
            with guidance_shared(self._axis, by_rows=False):
                output = call(*args, **kwargs)
            leaves, structure = tree_flatten(output)
        if known is None:
            self._known[kind] = [(x.shape, x.dtype, x.device) for x in leaves], structure
            self._parts.append([])
        else:
            about, structure = known
            with torch.inference_mode(False):  # whose tensors do not tell that they were written to
                if turn == self._axis.rank:
                    leaves = [x.clone(memory_format=torch.contiguous_format) for x in leaves]
                else:
                    leaves = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in about]
            self._parts.append(leaves)
            output = tree_unflatten([Pending.of(x, turns) for x in leaves], structure)
        if turn < self._axis.size - 1:
            return output
        self._exchange()
        return tree_map(_plain, output)

    def _exchange(self) -> None:
        """Fill every tensor that is yet to come with the prediction of the group whose turn it was."""
        sizes = tuple(sum(x.nbytes for x in part) for part in self._parts)
        if any(sizes):
            mine = [x.flatten().view(torch.uint8) for x in self._parts[self._axis.rank]]
            device = next(x.device for part in self._parts for x in part)
            sent = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
            received = all_gather(sent, sizes, self._axis, 0)
            targets = [x.view(-1).view(torch.uint8) for part in self._parts for x in part]
            for target, data in zip(targets, received.split([x.numel() for x in targets]), strict=True):
                target.copy_(data)
        self._turns.filled = True
        self.begin_run()


def _batch_of(values: tuple) -> int:
    """The rows of a call: of its first tensor, or the samples of a list that comes first."""
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            return value.shape[0]
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            return len(value)
    raise ValueError("a denoiser was called without any tensor")


# Lists of layers, however long they are; and what has its rows in the second dim, after a layer for each.
_OF_LAYERS = {"skip_layers", "spatio_temporal_guidance_blocks"}
_ROWS_SECOND = {"encoder_hidden_states_llama3"}


def _rows(value: Any, name: str, batch: int, start: int, stop: int) -> Any:
    """The rows `start` to `stop` of whatever has one for each of the batch."""
    if name in _OF_LAYERS:
        return value
    if isinstance(value, Tensor):
        if name in _ROWS_SECOND:
            return value[:, start:stop]
        # Positions are shared by the batch, unless they have a dim for it.
        positions = name.endswith(("_ids", "rotary_emb")) and value.ndim < 3
        return value[start:stop] if value.shape[:1] == (batch,) and not positions else value
    if isinstance(value, dict):
        return {key: _rows(item, str(key), batch, start, stop) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        if isinstance(value, list) and len(value) == batch and not any(x.shape[:1] == (batch,) for x in tensors):
            return value[start:stop]  # an item for each row: sizes, lengths, samples
        return type(value)(_rows(item, name, batch, start, stop) for item in value)
    return value


def _kind(args: tuple, kwargs: dict) -> str:
    """What the shapes of an answer follow from; not floats, which may change by step."""
    given = [(name, x) for name, x in named_leaves((args, kwargs)) if not isinstance(x, float)]
    return repr([(name, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (name, str(x)) for name, x in given])
