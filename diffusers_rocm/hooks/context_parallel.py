"""Splits a model's sequences over ranks, leads its attention to the schedules, and gathers what comes out.

Everything hangs on torch's own module hooks, so `module.forward` stays free for those who replace it (offloading).
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..distributed.collectives import copy_to_axis, share_gradient
from ..models.plans.context_plan import (
    AfterWhole,
    ByTokens,
    ContextParallelPlan,
    Gather,
    InputPlan,
    KeyMask,
    LengthOf,
    ModulePlan,
    Refused,
    SplitAlready,
    gather,
)
from ..models.plans.plan import match, unmatched
from .sequence_split import SequenceSplit, SplitProcessor
from .tensor_parallel import base_layer


class _SplitCheckpoint:
    """A function that checkpoints a block, which then sees the lengths of its own forward whenever it runs again."""

    def __init__(self, original: Callable, split: SequenceSplit):
        self.original, self.split = original, split

    def __call__(self, block: Callable, *args: Any, **kwargs: Any) -> Any:
        split, lengths, leading = self.split, self.split.lengths, self.split.leading

        def run(*args: Any, **kwargs: Any) -> Any:
            split.lengths, split.leading = lengths, leading
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
    plan = split.plan
    found, parallel = _fitting(model, plan, split.name)
    hooks: list[Any] = [_begin(model, split), SplitCheckpoints(model, split)]
    # Hooks know the rule and not the path: each path would be a constant, and each block a graph, to the compiler.
    for rule, modules in found.items():
        for _, module in modules:
            hooks += _module_hooks(module, rule.removesuffix("?") or split.name, plan.modules[rule], split)
    alone = {path: stream for _, stream, modules in match(model, plan.alone) for path, _ in modules}
    idle = {path: argument for _, argument, modules in match(model, plan.idle) for path, _ in modules}
    asking = {path for _, _, modules in match(model, dict.fromkeys(plan.main_asks)) for path, _ in modules}
    for path, module in parallel:
        hooks += _must_reach(module, path, split, alone.get(path), path in asking, idle.get(path))
    for rule, (argument, names), modules in match(model, plan.kept):
        hooks += [hook for _, module in modules for hook in _gather_kept(module, rule, argument, names, split)]
    for _, _, layers in match(model, dict.fromkeys(plan.whole_keys)):
        hooks += [layer.register_forward_hook(_says(split, "keys_are_whole", True)) for _, layer in layers]
    for _, _, layers in match(model, dict.fromkeys(plan.whole_queries)):
        for _, layer in layers:
            hooks += [layer.register_forward_pre_hook(_says(split, "queries_are_whole", True))]
            hooks += [layer.register_forward_hook(_says(split, "queries_are_whole", False))]
    hooks.append(model.register_forward_hook(_end(split)))
    processors = {id(module.processor): module.processor for _, module in parallel}
    # `set_attn_processor(one)` gives it to all modules, those that are left alone as well.
    left_alone = [module for _, _, found in match(model, dict.fromkeys(plan.whole)) for _, module in found]
    shared = [module for module in left_alone if id(getattr(module, "processor", None)) in processors]
    hooks += [module.register_forward_pre_hook(_says(split, "keys_are_whole", True)) for module in shared]
    return hooks + [SplitProcessor(processor, split) for processor in processors.values()]


def _fitting(
    model: nn.Module, plan: ContextParallelPlan, name: str
) -> tuple[dict[str, list[tuple[str, nn.Module]]], list[tuple[str, nn.Module]]]:
    """The modules of each rule of the plan, and the attention modules that see split sequences, with their paths.

    Raises:
        ValueError: the plan does not fit the model, or some attention would not be seen.
    """
    for path, reason, modules in match(model, plan.impossible):
        if modules:
            raise ValueError(f"a {name} with {path} cannot be split: {reason}")
    found = {rule: modules for rule, _, modules in match(model, plan.modules) if rule}
    found |= {"": [("", model)]} if "" in plan.modules else {}
    if missing := unmatched(model, plan.paths()):
        raise ValueError(f"the context-parallel plan of {name} names {', '.join(missing)}, which this model lacks")
    for rule, modules in found.items():
        for path, module in modules:
            taken = _parameters(module)
            unknown = ", ".join(key for key in _inputs(module, plan.modules[rule]) if key not in taken)
            if unknown:
                raise ValueError(
                    f"the context-parallel plan splits {unknown}, which {path or name}'s forward does not take"
                )
    asked = {path: argument for path, (argument, _) in plan.kept.items()} | plan.idle
    for _, argument, modules in match(model, asked):
        for path, module in modules:
            taken = _parameters(module)
            hands_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
            if argument not in taken and not hands_on:
                raise ValueError(f"the context-parallel plan names {argument}, which {path}'s forward does not take")
    parallel = list(attention_modules(model, plan))
    if not parallel:
        raise ValueError(f"{name} has no attention module with a processor; its attention cannot be parallel")
    seen = {path for path, _ in parallel} | _whole_paths(model, plan)
    for path, module in _unseen_attention(model, seen):
        raise ValueError(
            f"{name}: {path} ({type(module).__name__}) has no processor, so its attention would be over one rank's "
            "tokens only; give it one, or name it in the `whole` of a ContextParallelPlan if it sees no split sequence"
        )
    return found, parallel


def _begin(model: nn.Module, split: SequenceSplit) -> RemovableHandle:
    """Every rank's gradients are its tokens' share: those of the inputs are summed here."""

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        split.lengths, split.leading, split.gathered = {}, 0, False
        split.keys_are_whole, split.queries_are_whole, split.key_mask = False, False, None
        if not torch.is_grad_enabled():
            return args, kwargs
        shared = functools.partial(_map_tensors, function=functools.partial(copy_to_axis, axis=split.cp))
        return tuple(shared(value) for value in args), {key: shared(value) for key, value in kwargs.items()}

    return model.register_forward_pre_hook(hook, with_kwargs=True)


def _end(split: SequenceSplit) -> Callable:
    """The answer is of all ranks' tokens, and its gradients are shared by them."""
    share = functools.partial(_map_tensors, function=functools.partial(share_gradient, axis=split.cp))
    shared = _map_outputs(lambda index, value: share(value))

    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if split.plan.main in split.lengths and not split.gathered:
            raise ValueError(
                f"the context-parallel plan of {split.name} gathers {split.plan.main} nowhere, and every rank would "
                "answer with its own tokens: add a gather() for the module that makes the output"
            )
        return shared(module, args, output)

    return hook


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
    """Of the class's forward: what offloading, caches and adapters put in its place does not always tell them."""
    _, *parameters = inspect.signature(type(base_layer(module)).forward).parameters.items()
    return dict(parameters)


def _inputs(module: nn.Module, how: Any) -> dict[str, InputPlan]:
    """The arguments that the plan names; of those marked as optional, what the module takes."""
    if not isinstance(how, Mapping):
        return {}
    taken = _parameters(module)
    named = {key: each for key, each in how.items() if isinstance(key, str)}
    return {k.removesuffix("?"): each for k, each in named.items() if not k.endswith("?") or k[:-1] in taken}


def _module_hooks(module: nn.Module, rule: str, how: ModulePlan, split: SequenceSplit) -> list[RemovableHandle]:
    if not isinstance(how, Mapping):
        return [module.register_forward_hook(_gather_outputs(rule, how, split))]
    inputs = _inputs(module, how)
    outputs = {key: each for key, each in how.items() if isinstance(key, int)}
    hooks = []
    if inputs:
        hooks.append(module.register_forward_pre_hook(_split_inputs(module, rule, inputs, split), with_kwargs=True))
    if outputs:
        hooks.append(module.register_forward_hook(_split_outputs(rule, outputs, split)))
    return hooks


def _split_inputs(module: nn.Module, rule: str, inputs: dict[str, InputPlan], split: SequenceSplit) -> Callable:
    positions = {key: index for index, key in enumerate(_parameters(module))}

    def apart(value: Any, how: ContextParallelInput | Sequence[ContextParallelInput | None] | None, key: str) -> Any:
        if how is None:
            return value
        if isinstance(how, ContextParallelInput):
            each = functools.partial(split.split, how=how, what=f"{rule}'s {key}", stream=key in split.plan.streams)
            return _map_tensors(value, each)
        if not isinstance(value, (list, tuple)) or len(value) != len(how):
            raise ValueError(f"{split.name}: {rule}'s {key} is no list of {len(how)} tensors, as the plan has it")
        return type(value)(apart(item, each, key) for item, each in zip(value, how, strict=True))

    def hook(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        values = list(args)
        for key, how in inputs.items():
            where, index = (kwargs, key) if key in kwargs else (values, positions[key])
            if where is values and index >= len(values) or where[index] is None:
                continue
            value = where[index]
            if isinstance(how, Refused):
                if not how.when(value):
                    continue
                raise ValueError(f"{split.name}: a split sequence cannot go with {key}: {how.reason}")
            if isinstance(how, SplitAlready):
                split.lengths[key] = split.lengths[how.stream]
            elif isinstance(how, ByTokens):
                where[index] = split.by_tokens(value, how)
            elif isinstance(how, LengthOf):
                split.lengths[how.stream] = how.function(value)
            elif isinstance(how, AfterWhole):
                where[index] = split.after_whole(value, how.dim, f"{rule}'s {key}")
                if key == split.plan.main:
                    split.leading = value.shape[how.dim] - split.lengths[key]
            elif isinstance(how, KeyMask):
                where[index] = split.mask_keys(value, how.stream)
            elif isinstance(how, Gather):
                where[index] = split.gather(value, how, f"{rule}'s {key}")
            elif key in split.plan.streams:
                split.lengths[key] = value.shape[how.split_dim]
                # No view, which would keep all of it, and whose strides and offset would be another graph.
                where[index] = apart(value, how, key).clone(memory_format=torch.contiguous_format)
            else:
                where[index] = apart(value, how, key)
        return tuple(values), kwargs

    return hook


def _split_outputs(rule: str, outputs: dict[int, ContextParallelInput], split: SequenceSplit) -> Callable:
    def apart(index: int, value: Any) -> Any:
        if index not in outputs:
            return value
        return split.split(value, outputs[index], f"output {index} of {rule}")

    return _map_outputs(apart)


def _gather_outputs(
    rule: str, how: ContextParallelOutput | Sequence[ContextParallelOutput | None], split: SequenceSplit
) -> Callable:
    def together(index: int, value: Any) -> Any:
        if not isinstance(how, ContextParallelOutput) and index >= len(how):
            raise ValueError(f"{split.name}: {rule} has more outputs than the {len(how)} that the plan gathers")
        each = how if isinstance(how, ContextParallelOutput) else how[index]
        gather = functools.partial(split.gather, how=each, what=f"output {index} of {rule}")
        return value if each is None else _map_tensors(value, gather)

    return _map_outputs(together)


def _gather_kept(
    module: nn.Module, rule: str, argument: str, names: tuple[str, ...], split: SequenceSplit
) -> list[RemovableHandle]:
    """What the module leaves in a cache, of this rank's tokens, becomes that of all."""
    found: list[Any] = []

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        found[:] = [getattr(kwargs.get(argument), name, None) for name in names]

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        for name, earlier in zip(names, found, strict=True):
            value = getattr(kwargs.get(argument), name, None)
            if value is not earlier and value is not None:
                whole = split.gather(value, gather(dims=value.ndim), f"{rule}'s {argument}.{name}")
                setattr(kwargs[argument], name, whole)
        found.clear()

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def may_be_cached(module: nn.Module) -> bool:
    """A cache of diffusers: one that answers for a whole attention goes by the number of the step, as on all ranks."""
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    return any(word in name for name in hooks for word in ("cache", "fbc", "broadcast"))


def _says(split: SequenceSplit, name: str, value: bool) -> Callable:
    """A hook that sets something of the split, for the attention that comes next."""

    def hook(*_) -> None:
        setattr(split, name, value)

    return hook


def _must_reach(
    module: nn.Module, path: str, split: SequenceSplit, alone: str | None, main_asks: bool, idle: str | None
) -> list[RemovableHandle]:
    """A module that computes attention by itself would see this rank's tokens only, and paint a wrong picture."""

    def before(module: nn.Module, args: tuple) -> None:
        split.reached, split.alone, split.main_asks = False, alone, main_asks
        split.window = getattr(module, "sliding_window", None)

    def after(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if split.reached or may_be_cached(module) or idle is not None and kwargs.get(idle):
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

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after, with_kwargs=True)]
