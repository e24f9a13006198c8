"""Tensor parallelism over slices of tokens: norms and gates go over a slice on each rank, and sums hide.

Between products, where a rank of tensor parallelism would repeat what all others compute, it has a slice of each
stream of tokens (Korthikanti et al., 2022). What its column products read is gathered, and of what its row products
sum it keeps its slice: as many bytes as a sum, in two messages, which pay where they go by copies beside the products
(docs/performance.md). So it is for graphs of a step, where ranks reach each other's memory over fast links, or that of
the host; the calls before the capture go by the group.
"""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..distributed.choices import goes_by_copies
from ..distributed.collectives import all_gather, on_all_ranks
from ..distributed.host_memory import carries
from ..distributed.links import reaches_memory
from ..distributed.mesh import Axes
from ..distributed.peer_products import gather_slices, keep_messages_in_order, multiply, multiply_and_scatter
from ..distributed.quantized import is_plain
from ..models.plans.plan import TokenSlicePlan, match
from . import tensor_parallel_layers as layers
from .sequence_split import SequenceSplit
from .tensor_parallel import base_layer


logger = logging.getLogger(__name__)

_SHARDED = layers.ColumnParallelLinear, layers.RowParallelLinear


def _adds_to_it(module: nn.Module) -> bool:
    """Whether it has an adapter, or hooks of diffusers or accelerate."""
    hooked = getattr(getattr(module, "_diffusers_hook", None), "hooks", None) or hasattr(module, "_hf_hook")
    return bool(hooked) or hasattr(module, "lora_A")


def _is_watched(module: nn.Module) -> bool:
    """Whether hooks that are not ours look at it, or change it."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(str(getattr(hook, "__module__", "")).startswith("diffusers_rocm.") for hook in hooks)


def _arguments(module: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(module.forward).parameters)


class TokenSlices:
    """What the hooks and the products of one model share.

    Attributes:
        active: whether the forward that runs has its tokens in slices.
    """

    def __init__(self, model: nn.Module, plan: TokenSlicePlan, axes: Axes, split: SequenceSplit | None):
        self._model, self._plan, self._split, self._context = model, plan, split, axes.context.size
        self.axis: Axis = axes.tp
        self.active = False
        self._fits = self._may = False  # of the model, and of this call of it
        self._said = ""
        self._lengths: list[int] = []  # of each stream, on this rank of the context, in this forward
        self._handles: list[Any] = []

    def __deepcopy__(self, memo: dict) -> "TokenSlices":
        return self  # what hooks of a copied model share is that of the model

    def by_copies(self, wanted: bool) -> None:
        """Have tokens in slices, where ranks reach each other's memory over fast links, or that of the host, or no
        longer; all call it."""
        self.remove()
        reached = wanted and goes_by_copies(self.axis) and reaches_memory(self.axis)
        if reached or wanted and carries(self.axis.group.group_name):
            keep_messages_in_order()
            self._hang()

    def look(self) -> None:
        """Before a call that is captured, or like one that will be: whether the model is such that slices are right.

        All ranks ask, and tokens are in slices on all or on none.

        Adapters add what is of all tokens, caches look at a rank's own and might decide otherwise than those of other
        ranks, others' hooks and processors may read what is on its way, and what is rounded, or cast for its layer,
        cannot be multiplied in parts.
        """
        if not self._handles:
            return
        modules = list(self._model.modules())
        linears = [each for each in modules if isinstance(each, _SHARDED)]
        obstacles = self._obstacles(modules, linears)
        self._fits = on_all_ranks(not obstacles, self.axis)
        why = ", ".join(obstacles) or "what another rank has"
        how = "in slices" if self._fits else f"not in slices, for {why}"
        if how != self._said:
            logger.info(f"tokens of a {type(self._model).__name__} of {self.axis.size} ranks (tp) are {how}")
            self._said = how
        fused = any(getattr(module, "fused_projections", False) for module in modules)
        together: dict[nn.Linear, tuple[nn.Linear, ...]] = {}
        for paths in () if fused else self._plan.together:
            if self._context == 1 and paths[0] in self._plan.alongside:
                paths = (*paths, self._plan.alongside[paths[0]])
            groups = ([module for _, module in found] for *_, found in match(self._model, dict.fromkeys(paths)))
            together |= {linear: group for group in zip(*groups, strict=True) for linear in group}
        for _, names, found in match(self._model, self._plan.ends):
            for _, module in found if self._fits else ():
                module.ends = tuple(map(module.get_submodule, names))
                for linear in module.ends:
                    linear.later = True
        for linear in linears:
            linear.slices = self
            if getattr(linear, "together", ()) != together.get(linear, ()):
                linear.together = together.get(linear, ())

    def _obstacles(self, modules: list[nn.Module], linears: list[nn.Linear]) -> list[str]:
        """Why tokens cannot be in slices, as far as this rank knows."""
        found = {
            "adapters, caches or offloading": any(map(_adds_to_it, modules)),
            "hooks of others": any(_is_watched(module) for module in modules if module is not self._model),
            "attention processors of others": not all(
                type(each.processor) in self._plan.processors for each in modules if hasattr(each, "processor")
            ),
            "weights that are not plain": not all(
                type(each) in _SHARDED and is_plain(each.weight) for each in linears
            ),
            "weights of several dtypes": len({each.weight.dtype for each in linears}) != 1,
            "weights of 8 bits": any(each.weight.dtype.itemsize == 1 for each in linears),
        }
        return [name for name, is_so in found.items() if is_so]

    def _hang(self) -> None:
        model, plan = self._model, self._plan
        sliced = model.get_submodule(plan.sliced)
        self._handles = [
            model.register_forward_pre_hook(self._start(_arguments(model)), with_kwargs=True),
            sliced.register_forward_pre_hook(self._begin(_arguments(sliced)), with_kwargs=True),
            base_layer(model.get_submodule(plan.gathered)).register_forward_hook(self._end, prepend=True),
        ]
        for path in plan.sliced_again:
            module = base_layer(model.get_submodule(path))
            self._handles.append(module.register_forward_pre_hook(self._all))
            self._handles.append(module.register_forward_hook(self._own))
        for _, names, found in match(model, plan.whole):
            for _, module in found:
                if isinstance(names[0], int):
                    self._handles.append(module.register_forward_hook(self._whole_output(*names)))
                else:
                    self._handles.append(module.register_forward_pre_hook(self._whole_inputs(names), with_kwargs=True))
        for *_, found in match(model, plan.ends):
            self._handles += [module.register_forward_hook(self._scattered) for _, module in found]
        for _, name, found in match(model, plan.joined):
            hook = self._ordered(name)
            self._handles += [module.register_forward_pre_hook(hook, with_kwargs=True) for _, module in found]
        self._handles.append(model.register_forward_hook(self._over, always_call=True))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if self._handles:
            for module in self._model.modules():
                for name in ("slices", "together", "made", "later", "ends"):
                    vars(module).pop(name, None)
        self._handles, self.active, self._may = [], False, False

    def _start(self, names: tuple[str, ...]) -> Callable:
        """A hook of the model, with these arguments, that asks whether its tokens may be in slices in this call."""

        def hook(model: nn.Module, args: tuple, kwargs: dict) -> None:
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            refused = (
                given.get(name) is not None and refuses(given[name]) for name, refuses in self._plan.not_with.items()
            )
            self._may = (
                self._fits
                and model is self._model  # a copy has its tokens whole
                and not torch.is_grad_enabled()
                and not torch.is_autocast_enabled(self.axis.device.type)
                and not any(refused)
            )

        return hook

    def _begin(self, names: tuple[str, ...]) -> Callable:
        """A hook of the module that has the streams, with these arguments: slices, if all ranks have alike."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if not self._may:
                return None
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            streams = [given.get(name) for name in self._plan.streams]
            lengths = self._lengths = [x.shape[1] for x in streams if isinstance(x, Tensor)]
            if self._split is not None:
                lengths = [self._split.lengths.get(name, 1) for name in self._plan.streams]
            ranks = self._context * self.axis.size
            self.active = len(self._lengths) == len(streams) and all(length % ranks == 0 for length in lengths)
            if not self.active:
                return None
            sliced = (*self._plan.streams, *self._plan.besides)
            return (), {name: self._slice(x) if name in sliced else x for name, x in given.items()}

        return hook

    def _slice(self, x: Any) -> Any:
        """This rank's tokens of [B, S, ...], or of each in a list."""
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._slice, x))
        return x if x is None else x.chunk(self.axis.size, 1)[self.axis.rank]

    def _end(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self._gathered(output) if self.active else output

    def _all(self, module: nn.Module, args: tuple) -> tuple | None:
        return (self._gathered(args[0]), *args[1:]) if self.active else None

    def _own(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return self._slice(output) if self.active else output

    def _gathered(self, x: Tensor) -> Tensor:
        return all_gather(x, (x.shape[1],) * self.axis.size, self.axis, 1)

    def _whole_inputs(self, names: tuple[str, ...]) -> Callable:
        """A hook that gives a module all tokens of these arguments, of which the first may come by position."""

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if not self.active:
                return None
            given = [*args[:1], *(kwargs[name] for name in names[len(args[:1]) :])]
            whole = gather_slices(given, self.axis)
            kwargs = {**kwargs, **dict(zip(names[len(args[:1]) :], whole[len(args[:1]) :], strict=True))}
            return (*whole[: len(args[:1])], *args[1:]), kwargs

        return hook

    def _whole_output(self, index: int) -> Callable:
        def hook(module: nn.Module, args: tuple, output: tuple) -> tuple | None:
            if not self.active:
                return None
            return (*output[:index], *gather_slices([output[index]], self.axis), *output[index + 1 :])

        return hook

    def _ordered(self, name: str) -> Callable:
        """A hook that brings what goes with the joined tokens of all streams, along dim 0, into their order.

        Gathered, they are in the order of ranks: of each its slices of all streams.
        """

        def ordered(x: Tensor) -> Tensor:
            slices = (each.unflatten(0, (self.axis.size, -1)) for each in x.split(self._lengths))
            return torch.cat(list(slices), 1).flatten(0, 1)

        def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
            if not self.active:
                return None
            return args, {**kwargs, name: tuple(map(ordered, kwargs[name]))}

        return hook

    def _scattered(self, module: nn.Module, args: tuple, outputs: tuple) -> tuple | None:
        """Make the row products that end a module, of its first outputs."""
        if not self.active:
            return None
        count = len(module.ends)
        return (*multiply_and_scatter(outputs[:count], module.ends, self.axis), *outputs[count:])

    def _over(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.active = self._may = False

    def scatter(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A row product: its sum over the ranks, of which this one has its slice."""
        return x if linear.later else multiply_and_scatter([x], [linear], self.axis)[0]

    def project(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """A column product of all tokens, and those of the same input that are made with it."""
        made, linear.made = linear.made, None
        if made is not None and made[0] is x:
            return made[1]
        together = linear.together or (linear,)
        for other, y in zip(together, multiply(x, together), strict=True):
            if other is linear:
                output = y
            else:
                other.made = x, y
        return output
