"""Splits a model's sequences over ranks, leads its attention to the schedules, and gathers what comes out.

Everything hangs on torch's own module hooks, so `module.forward` stays free for those who replace it (offloading).
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ..distributed.collectives import copy_to_axis, gather_from_axis, share_gradient
from ..distributed.mesh import Axes
from ..models.attention_dispatch import Kernel, choose_kernel
from ..models.attention_parallel import Layout, attention, attention_of_whole_queries
from ..models.plans.context_plan import (
    ContextParallelPlan,
    Gather,
    InputPlan,
    KeyMask,
    LastTokens,
    LeadingPart,
    LeadingTokens,
    ModulePlan,
    PerTokens,
    SplitAlready,
    TokensOfItems,
    TrailingTokens,
)
from ..models.plans.plan import match
from .stand_in import stands_in_for


class SequenceSplit:
    """What the hooks and the attention of one model share: the axes, and the lengths of the forward that runs.

    A processor of diffusers that has it as its `_parallel_config` sends its attention here through the dispatch.
    """

    def __init__(self, name: str, plan: ContextParallelPlan, axes: Axes, rotate_method: str):
        self.name, self.plan, self.rotate_method = name, plan, rotate_method
        self.cp, self.ring, self.ulysses, self.model = axes.context, axes.ring, axes.ulysses, axes.model
        self.lengths: dict[str, int] = {}  # of each stream, in this forward
        self.reached = False  # by the attention module that runs
        self.window: int | None = None  # of that module
        self.keys_are_whole = False  # those of the attention that comes next
        self.queries_are_whole = False  # the same of its queries
        self.key_mask: Tensor | None = None  # over the joined sequence, of the block that runs
        self._masked_items = 0  # of the batch, for which attention has taken it
        self.alone: str | None = None  # the only stream that the attention module that runs is over

    def __deepcopy__(self, memo: dict) -> "SequenceSplit":
        return self  # what hooks and processors of a copied model share is that of the model

    def split(self, x: Tensor, how: ContextParallelInput, what: str, stream: bool = False) -> Tensor:
        """This rank's run of `x` along `how.split_dim`; all of it if that is one element, and no stream of tokens.

        Raises:
            ValueError: more dims than expected, or fewer tokens than ranks.
        """
        if how.expected_dims is not None and x.ndim != how.expected_dims:
            if x.ndim < how.expected_dims:
                return x
            raise ValueError(
                f"{self.name}: {what} should have {how.expected_dims} dims, and its shape is {[*x.shape]}"
            )
        if isinstance(how, LastTokens):
            length, count = self.lengths[self.plan.main], x.shape[how.split_dim]
            ((start, stop),) = Layout((length,), self.ring, self.ulysses).runs(self.cp.rank)
            start, stop = (max(each - (length - count), 0) for each in (start, stop))
            return x.narrow(how.split_dim, start, stop - start)
        if isinstance(how, TokensOfItems):
            dim = how.split_dim
            items = x.unflatten(dim, (-1, self.lengths[self.plan.main]))
            return self.split(items, ContextParallelInput(dim + 1), what).flatten(dim, dim + 1)
        rest = []
        if isinstance(how, LeadingPart):
            length = self.lengths[self.plan.main]
            x, *rest = x.split([length, x.shape[how.split_dim] - length], how.split_dim)
        length = x.shape[how.split_dim]
        if length == 1 and not stream:
            return x
        if length < self.cp.size:
            raise ValueError(
                f"{self.name}: {what} has {length} tokens, too few to split over {self.cp.size} ranks; use a degree "
                f"of at most {length}"
            )
        part = Layout((length,), self.ring, self.ulysses).take(x, how.split_dim, self.cp.rank)
        return torch.cat([part, *rest], how.split_dim) if rest else part

    def leading(self, count: int) -> int:
        """How many of the first `count` tokens of the main stream this rank holds."""
        ((start, stop),) = Layout((self.lengths[self.plan.main],), self.ring, self.ulysses).runs(self.cp.rank)
        return min(max(count - start, 0), stop - start)

    def trailing(self, count: int) -> int:
        """How many of the last `count` tokens of the main stream this rank holds."""
        total = self.lengths[self.plan.main]
        return self.leading(total) - self.leading(total - count)

    def mask_keys(self, mask: Tensor, stream: str) -> Tensor:
        """Have attention mask the keys of this stream, until the next such mask; returns one that masks nothing."""
        at = self.plan.streams.index(stream)
        before, after = (
            sum(self.lengths[each] for each in side) for side in (self.plan.streams[:at], self.plan.streams[at + 1 :])
        )
        self.key_mask, self._masked_items = F.pad(mask.bool(), (before, after), value=True), 0
        return torch.ones_like(self.split(mask, ContextParallelInput(1, 2), f"the mask of {stream}", stream=True))

    def _next_mask(self, batch: int) -> Tensor:
        """For all items, or for those that come next where a processor goes through the batch."""
        start = self._masked_items % len(self.key_mask)
        self._masked_items = start + batch
        return self.key_mask[start : start + batch]

    def gather(self, x: Tensor, how: ContextParallelOutput, what: str) -> Tensor:
        """`x` of all ranks, along `how.gather_dim`."""
        stream = getattr(how, "stream", None) or self.plan.main
        length = self.lengths.get(stream)
        sizes = Layout((length,), self.ring, self.ulysses).lengths() if length is not None else ()
        if not sizes or x.shape[how.gather_dim] != sizes[self.cp.rank]:
            raise ValueError(
                f"{self.name}: {what} is {[*x.shape]}, which is not this rank's part of {stream} "
                f"({length} tokens over {self.cp.size} ranks); the plan does not fit the model"
            )
        return copy_to_axis(gather_from_axis(x, sizes, self.cp, how.gather_dim), self.cp)

    def layout(self, queries: int, keys: int) -> Layout:
        """Of all streams that this forward split, joined, or of the main one: whichever has this many tokens here."""
        streams = tuple(self.lengths[stream] for stream in self.plan.streams if stream in self.lengths)
        candidates = [Layout(streams, self.ring, self.ulysses)] if streams else []
        if self.alone is not None:
            candidates = [Layout((self.lengths[self.alone],), self.ring, self.ulysses)]
        elif self.plan.main in self.lengths:
            candidates.append(Layout((self.lengths[self.plan.main],), self.ring, self.ulysses))
        for layout in candidates:
            if queries == keys == layout.length(self.cp.rank):
                return layout
        held = [layout.length(self.cp.rank) for layout in candidates]
        raise ValueError(
            f"{self.name}: attention of {queries} queries to {keys} keys, but rank {self.cp.rank} holds {held} tokens "
            f"of the sequences {self.lengths}; attention to keys that are not split belongs in the plan's `whole`"
        )

    def _around_queries(self, queries: int, keys: int) -> tuple[int, int] | None:
        """Where the main stream alone asks, and all streams answer: how many tokens here are before and after it."""
        streams = [stream for stream in self.plan.streams if stream in self.lengths]
        held = [Layout((self.lengths[each],), self.ring, self.ulysses).length(self.cp.rank) for each in streams]
        at = streams.index(self.plan.main) if self.plan.main in streams else len(streams)
        if queries == keys or held[at : at + 1] != [queries] or sum(held) != keys:
            return None
        return sum(held[:at]), sum(held[at + 1 :])

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
        is_causal: bool = False,
        kernel: Kernel | str | None = None,
    ) -> Tensor:
        """Attention [B, S, H, D] of this rank's queries to the keys of all ranks; the fastest kernel if not given."""
        self.reached = True

        def choose(q: Tensor, mask: Tensor | None, needs_lse: bool) -> Kernel:
            if not isinstance(kernel, Kernel):
                return choose_kernel(q, mask, kernel)
            if needs_lse and not kernel.gives_lse:
                raise ValueError(
                    f"attention backend {kernel.name!r} gives no log-sum-exp, by which a ring merges its parts; use "
                    'rotate_method="allgather", ulysses_degree, or set_attention_backend("native")'
                )
            return kernel

        if self.keys_are_whole:
            self.keys_are_whole = False
            out, _ = choose(q, mask, False)(q, k, v, mask, scale, is_causal)
            return out
        if self.queries_are_whole:
            if mask is not None or is_causal:
                raise ValueError(f"{self.name}: attention of whole queries to split keys takes no mask")
            layout = Layout((self.lengths[self.plan.main],), self.ring, self.ulysses)
            return attention_of_whole_queries(q, k, v, scale, layout, self.cp, choose)
        if around := self._around_queries(q.shape[1], k.shape[1]):
            every = F.pad(q, (0, 0, 0, 0, *around))
            return self.attend(every, k, v, mask, scale, is_causal, kernel).narrow(1, around[0], q.shape[1])
        if self.key_mask is not None:
            mask = self._next_mask(q.shape[0])
        if self.window is not None and mask is None:
            raise ValueError(
                f"{self.name}: attention in a sliding window over several ranks needs the model's mask, which it does "
                'not make for flash backends; use set_attention_backend("native")'
            )
        if is_causal and self.plan.causal is not None:
            layout = Layout((self.lengths[self.plan.causal],), self.ring, self.ulysses)
        else:
            layout = self.layout(q.shape[1], k.shape[1])
        whole = mask is not None and sum(layout.streams) in mask.shape[-2:]
        if not self.plan.ordered and len(layout.streams) > 1 and (is_causal or whole):
            raise ValueError(
                f"{self.name}: this attention depends on whether text or image comes first, which a cp_plan in "
                "diffusers' format does not say; pass a plan of diffusers_rocm.models.plans.context_plan, with its "
                "streams in order"
            )
        return attention(q, k, v, mask, scale, is_causal, layout, self.cp, choose, self.rotate_method)


class _DivertedAttention(TorchFunctionMode):
    """Leads `F.scaled_dot_product_attention` on [B, H, S, D] to the schedules."""

    def __init__(self, split: SequenceSplit):
        super().__init__()
        self.split = split

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
        if dropout_p:
            raise ValueError("attention over several ranks has no dropout")
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.split.attend(q, k, v, attn_mask, scale, is_causal).transpose(1, 2)


@functools.cache
def _diverted_class(cls: type) -> type:
    """`cls`, a processor that calls torch's attention, with that call led to the processor's `sequence_split`."""

    @stands_in_for(cls)
    class Diverted(cls):
        @functools.wraps(cls.__call__)  # diffusers looks at the signature
        def __call__(self, *args, **kwargs):
            with _DivertedAttention(self.sequence_split):
                return super().__call__(*args, **kwargs)

    return Diverted


class SplitProcessor:
    """A processor whose attention goes to the schedules, until `remove()`."""

    def __init__(self, processor: Any, split: SequenceSplit):
        self._processor, self._cls, self._split = processor, type(processor), split
        self._in_dispatch = hasattr(processor, "_parallel_config")
        self._before = getattr(processor, "_parallel_config", None)
        self.resume()

    def resume(self) -> None:
        if self._in_dispatch:
            self._processor._parallel_config = self._split
        else:
            self._processor.sequence_split = self._split
            self._processor.__class__ = _diverted_class(self._cls)

    def pause(self) -> None:
        if self._in_dispatch:
            self._processor._parallel_config = self._before
        else:
            self._processor.__class__ = self._cls
            del self._processor.sequence_split

    remove = pause


class _SplitCheckpoint:
    """A function that checkpoints a block, which then sees the lengths of its own forward whenever it runs again."""

    def __init__(self, original: Callable, split: SequenceSplit):
        self.original, self.split = original, split

    def __call__(self, block: Callable, *args: Any, **kwargs: Any) -> Any:
        split, lengths = self.split, self.split.lengths

        def run(*args: Any, **kwargs: Any) -> Any:
            split.lengths = lengths
            return block(*args, **kwargs)

        return self.original(run, *args, **kwargs)


class SplitCheckpoints:
    """Gradient checkpointing of a split model, switched on before or after it was split, until `remove()`."""

    def __init__(self, model: nn.Module, split: SequenceSplit):
        self._model = model

        def before(model: nn.Module, args: tuple) -> None:
            if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # which takes the lengths for constants
                return
            for module in model.modules():
                original = vars(module).get("_gradient_checkpointing_func")
                if original is not None and not isinstance(original, _SplitCheckpoint):
                    module._gradient_checkpointing_func = _SplitCheckpoint(original, split)

        self._handle = model.register_forward_pre_hook(before)

    def remove(self) -> None:
        self._handle.remove()
        for module in self._model.modules():
            if isinstance(bound := vars(module).get("_gradient_checkpointing_func"), _SplitCheckpoint):
                module._gradient_checkpointing_func = bound.original


def attention_modules(model: nn.Module, plan: ContextParallelPlan) -> Iterator[tuple[str, nn.Module]]:
    """The attention modules, by their processor, that see split sequences."""
    whole = _whole_paths(model, plan)
    for path, module in model.named_modules():
        if callable(getattr(module, "processor", None)) and path not in whole:
            yield path, module


def _whole_paths(model: nn.Module, plan: ContextParallelPlan) -> set[str]:
    return {path for _, _, found in match(model, dict.fromkeys(plan.whole)) for path, _ in found}


# What a module that computes attention calls its projections, where its class does not say that it does.
_PROJECTIONS = {"to_q", "to_qkv", "q_proj", "qkv", "qkv_proj", "query", "wq"}


def _unseen_attention(model: nn.Module, seen: set[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules that, by their looks, compute attention, and are neither in, nor around, those at the paths seen."""
    inside = tuple(f"{path}." for path in seen)
    for path, module in model.named_modules():
        by_name = re.search("attention|attn", type(module).__name__, re.IGNORECASE)
        apart = path not in seen and not path.startswith(inside) and not any(x.startswith(f"{path}.") for x in seen)
        if path and apart and (by_name or _PROJECTIONS & module._modules.keys()):
            yield path, module


def split_of(module: nn.Module) -> SequenceSplit | None:
    """The split that the attention of `module` goes through, if any."""
    for child in module.modules():
        processor = getattr(child, "processor", None)
        for found in (getattr(processor, "_parallel_config", None), getattr(processor, "sequence_split", None)):
            if isinstance(found, SequenceSplit):
                return found
    return None


def split_sequences(model: nn.Module, split: SequenceSplit) -> list[Any]:
    """Hang a split on its model; each of what is returned has a `remove()`.

    Raises:
        ValueError: the plan does not fit the model, or some attention would not be seen. Nothing is changed then.
    """
    plan, name = split.plan, split.name
    for path, reason, modules in match(model, plan.impossible):
        if modules:
            raise ValueError(f"a {name} with {path} cannot be split: {reason}")
    found = {rule: modules for rule, _, modules in match(model, plan.modules) if rule}
    found |= {"": [("", model)]} if "" in plan.modules else {}
    missing = [rule for rule, modules in found.items() if not modules and not rule.endswith("?")]
    if missing:
        raise ValueError(f"the context-parallel plan of {name} names {', '.join(missing)}, which this model lacks")
    for rule, modules in found.items():
        for path, module in modules:
            taken = _parameters(module)
            unknown = ", ".join(key for key in _inputs(module, plan.modules[rule]) if key not in taken)
            if unknown:
                raise ValueError(
                    f"the context-parallel plan splits {unknown}, which {path or name}'s forward does not take"
                )
    parallel = list(attention_modules(model, plan))
    if not parallel:
        raise ValueError(f"{name} has no attention module with a processor; its attention cannot be parallel")
    seen = {path for path, _ in parallel} | _whole_paths(model, plan)
    for path, module in _unseen_attention(model, seen):
        raise ValueError(
            f"{name}: {path} ({type(module).__name__}) has no processor, so its attention would be over one rank's "
            "tokens only; give it one, or name it in the `whole` of a ContextParallelPlan if it sees no split sequence"
        )

    hooks: list[Any] = [_begin(model, split), SplitCheckpoints(model, split)]
    for rule, modules in found.items():
        for path, module in modules:
            hooks += _module_hooks(module, path or name, plan.modules[rule], split)
    alone = {path: stream for _, stream, modules in match(model, plan.alone) for path, _ in modules}
    for path, module in parallel:
        hooks += _must_reach(module, path, alone.get(path), split)
    for _, _, layers in match(model, dict.fromkeys(plan.whole_keys)):
        hooks += [layer.register_forward_hook(_makes_whole_keys(split)) for _, layer in layers]
    for _, _, layers in match(model, dict.fromkeys(plan.whole_queries)):
        for _, layer in layers:
            hooks += [layer.register_forward_pre_hook(_whole_queries(split, True))]
            hooks += [layer.register_forward_hook(_whole_queries(split, False))]
    share = functools.partial(_map_tensors, function=functools.partial(share_gradient, axis=split.cp))
    hooks.append(model.register_forward_hook(_map_outputs(lambda index, value: share(value))))
    processors = {id(module.processor): module.processor for _, module in parallel}
    # `set_attn_processor(one)` gives it to all modules, those that are left alone as well.
    alone = [module for _, _, found in match(model, dict.fromkeys(plan.whole)) for _, module in found]
    shared = [module for module in alone if id(getattr(module, "processor", None)) in processors]
    hooks += [module.register_forward_pre_hook(_has_whole_keys(split)) for module in shared]
    return hooks + [SplitProcessor(processor, split) for processor in processors.values()]


def _begin(model: nn.Module, split: SequenceSplit) -> RemovableHandle:
    """Every rank's gradients are its tokens' share: those of the inputs are summed here."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        split.lengths, split.keys_are_whole, split.queries_are_whole, split.key_mask = {}, False, False, None
        if not torch.is_grad_enabled():
            return args, kwargs
        shared = functools.partial(_map_tensors, function=functools.partial(copy_to_axis, axis=split.cp))
        return tuple(shared(value) for value in args), {key: shared(value) for key, value in kwargs.items()}

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_map_tensors(item, function) for item in value)
    if isinstance(value, dict):
        return {key: _map_tensors(item, function) for key, item in value.items()}
    return value


def _map_outputs(function: Callable[[int, Any], Any]) -> Callable:
    """A forward hook that replaces each output by `function(its number, it)`."""

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if isinstance(output, dict):
            for index, (key, value) in enumerate(output.items()):
                output[key] = function(index, value)
            return output
        if isinstance(output, (list, tuple)):
            return type(output)(function(index, value) for index, value in enumerate(output))
        return function(0, output)

    return hook


def _parameters(module: nn.Module) -> dict[str, inspect.Parameter]:
    """Of the class's forward: what offloading and caches put in its place does not always tell them."""
    _, *parameters = inspect.signature(type(module).forward).parameters.items()
    return dict(parameters)


def _inputs(module: nn.Module, how: Any) -> dict[str, InputPlan]:
    """The arguments that the plan names; of those marked as optional, what the module takes."""
    if not isinstance(how, Mapping):
        return {}
    taken = _parameters(module)
    named = {key: each for key, each in how.items() if isinstance(key, str)}
    return {k.removesuffix("?"): each for k, each in named.items() if not k.endswith("?") or k[:-1] in taken}


def _module_hooks(module: nn.Module, path: str, how: ModulePlan, split: SequenceSplit) -> list[RemovableHandle]:
    if not isinstance(how, Mapping):
        return [module.register_forward_hook(_gather_outputs(path, how, split))]
    inputs = _inputs(module, how)
    outputs = {key: each for key, each in how.items() if isinstance(key, int)}
    hooks = []
    if inputs:
        hooks.append(module.register_forward_pre_hook(_split_inputs(module, path, inputs, split), with_kwargs=True))
    if outputs:
        hooks.append(module.register_forward_hook(_split_outputs(path, outputs, split)))
    return hooks


def _split_inputs(module: nn.Module, path: str, inputs: dict[str, InputPlan], split: SequenceSplit) -> Callable:
    positions = {key: index for index, key in enumerate(_parameters(module))}

    def apart(value: Any, how: ContextParallelInput | Sequence[ContextParallelInput | None] | None, key: str) -> Any:
        if how is None:
            return value
        if isinstance(how, ContextParallelInput):
            each = functools.partial(split.split, how=how, what=f"{path}'s {key}", stream=key in split.plan.streams)
            return _map_tensors(value, each)
        if not isinstance(value, (list, tuple)) or len(value) != len(how):
            raise ValueError(f"{split.name}: {path}'s {key} is no list of {len(how)} tensors, as the plan has it")
        return type(value)(apart(item, each, key) for item, each in zip(value, how, strict=True))

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        values = list(args)
        for key, how in inputs.items():
            where, index = (kwargs, key) if key in kwargs else (values, positions[key])
            if where is values and index >= len(values) or where[index] is None:
                continue
            value = where[index]
            if isinstance(how, (LeadingTokens, TrailingTokens)):
                count = split.leading if isinstance(how, LeadingTokens) else split.trailing
                where[index] = count(value)
                continue
            if isinstance(how, SplitAlready):
                split.lengths[key] = split.lengths[how.stream]
                continue
            if isinstance(how, PerTokens):
                total = split.lengths[split.plan.main]
                where[index] = how.function(value, total, split.leading(total))
                continue
            if isinstance(how, KeyMask):
                where[index] = split.mask_keys(value, how.stream)
                continue
            if isinstance(how, Gather):
                where[index] = split.gather(value, how, f"{path}'s {key}")
                continue
            if key in split.plan.streams:
                split.lengths[key] = value.shape[how.split_dim]
            where[index] = apart(value, how, key)
        return tuple(values), kwargs

    return hook


def _split_outputs(path: str, outputs: dict[int, ContextParallelInput], split: SequenceSplit) -> Callable:
    def apart(index: int, value: Any) -> Any:
        if index not in outputs:
            return value
        return split.split(value, outputs[index], f"output {index} of {path}")

    return _map_outputs(apart)


def _gather_outputs(
    path: str, how: ContextParallelOutput | Sequence[ContextParallelOutput | None], split: SequenceSplit
) -> Callable:
    def together(index: int, value: Any) -> Any:
        if not isinstance(how, ContextParallelOutput) and index >= len(how):
            raise ValueError(f"{split.name}: {path} has more outputs than the {len(how)} that the plan gathers")
        each = how if isinstance(how, ContextParallelOutput) else how[index]
        gather = functools.partial(split.gather, how=each, what=f"output {index} of {path}")
        return value if each is None else _map_tensors(value, gather)

    return _map_outputs(together)


def _may_be_cached(module: nn.Module) -> bool:
    """A cache of diffusers that answers for the whole module by the number of the step, the same on all ranks."""
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return any("cache" in name or "broadcast" in name for name in hooks)


def _makes_whole_keys(split: SequenceSplit) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> None:
        split.keys_are_whole = True

    return hook


def _whole_queries(split: SequenceSplit, are: bool) -> Callable:
    def hook(*_) -> None:
        split.queries_are_whole = are

    return hook


def _has_whole_keys(split: SequenceSplit) -> Callable:
    def hook(module: nn.Module, args: tuple) -> None:
        split.keys_are_whole = True

    return hook


def _must_reach(module: nn.Module, path: str, alone: str | None, split: SequenceSplit) -> list[RemovableHandle]:
    """A module that computes attention by itself would see this rank's tokens only, and paint a wrong picture."""

    def before(module: nn.Module, args: tuple) -> None:
        split.reached, split.alone = False, alone
        split.window = getattr(module, "sliding_window", None)

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        if split.reached or _may_be_cached(module):
            return
        if split_of(module) is None:
            raise ValueError(
                f"{split.name}: the processor of {path} ({type(module.processor).__name__}) was set after "
                "enable_parallelism(); call disable_parallelism() and enable_parallelism() once it is there"
            )
        raise ValueError(
            f"{split.name}: {path} ({type(module.processor).__name__}) computed its attention by itself, over "
            "this rank's tokens only; if all its keys are there, name it in the plan's `whole`"
        )

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
