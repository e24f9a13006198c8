"""Shares the branches of classifier-free guidance (Ho and Salimans, 2022) between groups of ranks.

Pipelines run the branches in two ways. Those that stack them call the denoiser once a step: each group takes its rows
of the batch. Those that call it once for each branch: the groups take turns, and the call whose turn is another
group's is answered at once by tensors that are yet to come. With the last call all predictions are exchanged. Whoever
reads one before that gets an error: every answer is what the denoiser says to that very input, or none.
"""

import functools
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..distributed.agreement import ROUNDING, fail_together
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
        self.casts: list[tuple[Tensor, Callable, tuple, dict]] = []

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

# What pipelines do to a prediction before they ask for the next: made once more of the values, when they are there.
_CASTS = {
    Tensor.to, Tensor.type_as, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.contiguous,
    Tensor.clone,
}  # fmt: skip


class Pending(Tensor):
    """A prediction that is yet to come: views of it and casts can be had at once, anything else when it is there."""

    turns: _Turns

    @staticmethod
    def of(x: Tensor, turns: _Turns) -> "Pending":
        """`x`, of the same memory, which is filled when its turns are over."""
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
            plain, turns = [_plain(x) for x in waiting], waiting[0].turns
            versions = [x._version for x in plain]
            with torch.inference_mode(False):  # whose tensors do not tell that they were written to
                result = func(*args, **kwargs)
            leaves, storages = tree_leaves(result), {x.untyped_storage().data_ptr() for x in plain}
            views = all(isinstance(x, Tensor) and x.untyped_storage().data_ptr() in storages for x in leaves)
            if not views and func in _CASTS:
                turns.casts.append((result, func, args, kwargs))
            elif not views or not leaves or versions != [x._version for x in plain]:
                raise turns.too_early(getattr(func, "__name__", str(func)))
            return tree_map(lambda x: Pending.of(x, turns), result)


def _plain(x: Any) -> Any:
    return x.as_subclass(Tensor) if isinstance(x, Pending) else x


class _Step:
    """The calls of a step so far, of all denoisers that take turns with each other."""

    def __init__(self, name: str, size: int):
        self.name, self.size = name, size
        self.begin()

    def begin(self) -> None:
        self.turns, self.parts = _Turns(self.name, self.size), []


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
        self._known: dict[str, tuple[list[Callable[[], Any]], Any]] = {}  # makes what is like an answer's parts
        self._step = _Step(self._name, axis.size)

    def take_turns_with(self, other: "GuidanceParallel") -> None:
        """For a pipeline with a denoiser for each branch."""
        self._step = other._step

    def begin_run(self) -> None:
        """Forget calls whose others never came: their run was interrupted."""
        self._step.begin()

    def end_step(self) -> None:
        """Raises ValueError where the step had fewer calls than there are groups."""
        if self._step.parts:
            turns = self._step.turns
            self._step.begin()
            raise turns.too_early("a step of the scheduler")

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        early = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Pending) and not x.turns.filled]
        if early:
            raise early[0].turns.too_early("another call")
        args, kwargs = tree_map(_plain, (args, kwargs))
        everything = itertools.chain(self._module.parameters(), tree_leaves((args, kwargs)))
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in everything):
            raise ValueError(f"cfg={self._axis.size} shares predictions, not gradients: run under torch.no_grad()")
        rows = _rows_of((*args, *kwargs.values()))
        try:
            if len(rows) % self._axis.size == 0:
                return self._split(call, args, kwargs, rows)
            return self._take_turns(call, args, kwargs)
        except BaseException:
            self.begin_run()
            raise

    def _split(self, call: Callable, args: tuple, kwargs: dict, rows: Tensor | list[Any]) -> Any:
        batch, in_list = len(rows), isinstance(rows, list)
        if in_list and len({repr([getattr(x, "shape", x) for x in tree_leaves(row)]) for row in rows}) > 1:
            raise self._unshared("is given samples of several shapes")
        start, stop = Block(batch, 1).bounds(self._axis.rank, self._axis.size)
        kind, expected = _kind(args, kwargs) if self.check else "", None
        is_new = self.check and kind not in self._split_before
        take = functools.partial(_rows, batch=batch, start=start, stop=stop, in_list=in_list)
        try:
            own = tuple(take(x, "") for x in args), {name: take(x, name) for name, x in kwargs.items()}
        except _NoRows as error:
            raise self._unshared(str(error)) from None
        together = fail_together(f"run {self._name} on its rows", self._axis) if is_new else nullcontext()
        with together:
            if is_new and not any(map(may_be_cached, self._module.modules())):
                again = tree_map(lambda x: x, (args, kwargs))  # HunyuanDiT empties a list that it is given
                expected = tree_leaves(call(*again[0], **again[1]))
            leaves, structure = self._answers(call, *own, stop - start)
        sizes = (stop - start,) * self._axis.size
        for index, x in enumerate(leaves):
            if isinstance(x, Tensor):
                leaves[index] = all_gather(x, sizes, self._axis, 0)
            elif isinstance(x, list):
                leaves[index] = [*all_gather(torch.stack(x), sizes, self._axis, 0)]
        if is_new:
            self._split_before.add(kind)
        if expected is not None:
            self._compare(tree_leaves(leaves), expected)
        return tree_unflatten(leaves, structure)

    def _answers(self, call: Callable, args: tuple, kwargs: dict, count: int) -> tuple[list[Any], Any]:
        """What the denoiser says to some rows: tensors, and lists of a tensor for each row, by themselves."""

        def is_samples(x: Any) -> bool:
            return isinstance(x, list) and len(x) == count and all(isinstance(each, Tensor) for each in x)

        try:
            with guidance_shared(self._axis, by_rows=True):
                leaves, structure = tree_flatten(call(*args, **kwargs), is_samples)
        except (ValueError, torch.OutOfMemoryError):  # which say what is wrong
            raise
        except Exception as error:
            raise self._unshared(f"fails on a part of its rows ({error})") from error
        for x in leaves:
            if isinstance(x, Tensor) and x.shape[:1] != (count,):
                raise self._unshared(f"answers {[*x.shape]} to {count} rows")
        return leaves, structure

    def _compare(self, parts: list[Any], whole: list[Any]) -> None:
        """Each group has the same parts, but computed the whole by itself: what one of them finds, all raise."""
        apart, worst = False, 0.0
        for x, y in zip(parts, whole, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point() and torch.isfinite(y).all():
                error = ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item()
                apart |= not error <= (1e-3 if x.dtype == torch.float32 else ROUNDING)
                worst = max(worst, error)
        if all_gather_int64(torch.tensor([apart]), self._axis).any():
            raise self._unshared(f"answers a part of its rows otherwise than all of them (relative error {worst:.1e})")

    def _unshared(self, reason: str) -> ValueError:
        return ValueError(
            f"{self._name} {reason}, so that they cannot be shared by cfg={self._axis.size}; use dp, ulysses or tp in "
            "its place"
        )

    def _take_turns(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        kind, turn, turns = _kind(args, kwargs), len(self._step.parts), self._step.turns
        known = self._known.get(kind)
        if known is None or turn == self._axis.rank:
            with guidance_shared(self._axis, by_rows=False):
                output = call(*args, **kwargs)
            leaves, structure = tree_flatten(output)
        if known is None:
            self._known[kind] = [_maker(x) for x in leaves], structure
            self._step.parts.append([])
        else:
            makers, structure = known
            with torch.inference_mode(False):  # whose tensors do not tell that they were written to
                if turn == self._axis.rank:
                    contiguous = torch.contiguous_format
                    leaves = [x.clone(memory_format=contiguous) if isinstance(x, Tensor) else x for x in leaves]
                else:
                    leaves = [make() for make in makers]
            self._step.parts.append([x for x in leaves if isinstance(x, Tensor)])
            pending = [Pending.of(x, turns) if isinstance(x, Tensor) else x for x in leaves]
            output = tree_unflatten(pending, structure)
        if turn < self._axis.size - 1:
            return output
        self._exchange()
        return tree_map(_plain, output)

    def _exchange(self) -> None:
        """Fill every tensor that is yet to come with the prediction of the group whose turn it was."""
        parts, turns = self._step.parts, self._step.turns
        sizes = tuple(sum(x.nbytes for x in part) for part in parts)
        if any(sizes):
            mine = [x.flatten().view(torch.uint8) for x in parts[self._axis.rank]]
            device = next(x.device for part in parts for x in part)
            sent = torch.cat(mine) if mine else torch.empty(0, dtype=torch.uint8, device=device)
            received = all_gather(sent, sizes, self._axis, 0)
            targets = [x.view(-1).view(torch.uint8) for part in parts for x in part]
            for target, data in zip(targets, received.split([x.numel() for x in targets]), strict=True):
                target.copy_(data)
            for target, cast, args, kwargs in turns.casts:
                target.copy_(cast(*args, **kwargs))
        turns.casts.clear()
        turns.filled = True
        self._step.begin()


def _maker(x: Any) -> Callable[[], Any]:
    """Makes room for a tensor of this kind; what is no tensor is the same each time."""
    if isinstance(x, Tensor):
        return functools.partial(torch.empty, x.shape, dtype=x.dtype, device=x.device)
    return lambda: x


def _rows_of(values: tuple) -> Tensor | list[Any]:
    """What a call has its rows in: its first tensor, or the samples of a list that comes first."""
    for value in values:
        in_list = isinstance(value, list) and bool(value) and isinstance(tree_leaves(value)[0], Tensor)
        if in_list or isinstance(value, Tensor) and value.ndim:
            return value
    raise ValueError("a denoiser was called without any tensor")


class _NoRows(Exception):
    """Says what has rows in a way of its own."""


# What is of layers, however long it is; and what has its rows in the second dim, after a layer for each.
_OF_LAYERS = {"skip_layers", "spatio_temporal_guidance_blocks", "control_hidden_states_scale"}
_ROWS_SECOND = {"encoder_hidden_states_llama3"}


def _rows(value: Any, name: str, batch: int, start: int, stop: int, in_list: bool) -> Any:
    """The rows `start` to `stop` of whatever has one for each of the batch."""
    if name in _OF_LAYERS:
        return value
    if isinstance(value, Tensor):
        if name in _ROWS_SECOND:
            return value[:, start:stop]
        return value[start:stop] if value.shape[:1] == (batch,) and not _are_positions(name, value) else value
    again = functools.partial(_rows, batch=batch, start=start, stop=stop, in_list=in_list)
    if isinstance(value, dict):
        if any(isinstance(key, int) for key in value) and not any(isinstance(x, Tensor) for x in tree_leaves(value)):
            raise _NoRows(f"is given {name} by the numbers of its rows")
        return {key: again(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        tensors = [x for x in tree_leaves(value) if isinstance(x, Tensor)]
        stacked = any(x.shape[:1] == (batch,) for x in tensors) and not in_list
        if isinstance(value, list) and len(value) == batch and not stacked:
            return value[start:stop]  # an item for each row: sizes, lengths, samples
        return type(value)(again(item, name) for item in value)
    return value


def _are_positions(name: str, x: Tensor) -> bool:
    """Those that the whole batch shares: [S], [S, up to four coordinates], or cosines and sines [S, D]."""
    if name.endswith("rotary_emb"):
        return x.ndim < 3
    coordinates = name.endswith("_ids") and not name.endswith("type_ids") and x.ndim == 2 and x.shape[1] <= 4
    return coordinates or x.ndim == 1 and (name.startswith("indices_") or name.endswith("_ids"))


def _kind(args: tuple, kwargs: dict) -> str:
    """What the shapes of an answer follow from; not floats, which may change by step."""
    given = [(name, x) for name, x in named_leaves((args, kwargs)) if not isinstance(x, float)]
    return repr([(name, tuple(x.shape), x.dtype) if isinstance(x, Tensor) else (name, str(x)) for name, x in given])
