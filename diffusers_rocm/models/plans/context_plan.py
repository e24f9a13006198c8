"""What a context-parallel plan is: data that says where a model's sequences are split and gathered."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor


@dataclass(frozen=True)
class ByTokens:
    """An argument that goes with the main stream's tokens in a way of its own.

    A rank with the tokens from `start` to `stop`, of `total`, is given `function(it, total, start, stop)` instead.
    """

    function: Callable[[Any, int, int, int], Any]


@dataclass(frozen=True)
class Refused:
    """An argument with which the sequence cannot be split, and why: any but None, or what `when` says."""

    reason: str
    when: Callable[[Any], bool] = lambda value: True


@dataclass(frozen=True)
class SplitAlready:
    """A stream of tokens that is split, and has become as long as another stream."""

    stream: str


@dataclass(frozen=True)
class KeyMask:
    """An argument [B, S] that says which tokens of a stream are keys, of which a processor makes masks by itself.

    It gets one for this rank's tokens in which all are; the mask of its attention is made from the true one. A
    processor that goes through the batch takes its items in order.
    """

    stream: str


@dataclass(frozen=True)
class LengthOf:
    """An argument from which the length of a stream is known, where tokens of others come with it."""

    stream: str
    function: Callable[[Any], int]


@dataclass(frozen=True)
class AfterWhole:
    """The main stream's tokens, along `dim`, after others that every rank keeps whole."""

    dim: int


@dataclass(frozen=True)
class Gather(ContextParallelOutput):
    """Of a stream of tokens: of `main` if None; `after_whole` if others, which every rank has, are before them."""

    stream: str | None = None
    after_whole: bool = False


# What diffusers' `_cp_plan` maps a module's path to, and counts. A list says it for each tensor of an argument that is
# a list, or for each output; None leaves one alone.
InputPlan = (
    ContextParallelInput
    | ByTokens
    | Refused
    | SplitAlready
    | KeyMask
    | LengthOf
    | AfterWhole
    | Gather
    | Sequence[ContextParallelInput | None]
)
ModulePlan = Mapping[str | int, InputPlan] | ContextParallelOutput | Sequence[ContextParallelOutput | None]


@dataclass(frozen=True)
class ContextParallelPlan:
    """Where the sequences of a model class are split and gathered.

    Attributes:
        modules: as diffusers' `_cp_plan`: module path (`*` for one component) -> how its arguments, its outputs
            (`split_output`) or both are split, or how its output is gathered. A dim of one element is left alone, and
            so is a tensor with fewer dims than expected. A list of tensors is split item by item, all alike or as a
            list in the plan says. An argument that is split already is gathered where its stream is named. Hooks run
            in the order of the rules. A trailing `?` marks a path, here and below, or an argument that a model of the
            class may lack. An index may count from a list's end: -1, or -KEY for a number in the model's config.
        streams: the arguments that are sequences of tokens, in the order in which attention joins them; attention is
            over all of them, or over `main` alone.
        main: the stream that becomes the output, and is gathered.
        alone: paths of attention modules -> the one stream that they are over, where that is not `main`.
        whole: paths of attention modules that see no split sequence among their keys (the text alone, or
            cross-attention): they are left alone.
        whole_keys: paths of layers that make keys of something that every rank has whole, in a processor that attends
            to split ones too: the attention that follows them is local.
        main_asks: paths of attention modules where `main` alone asks, and all streams answer.
        idle: paths of attention modules -> the argument by which, where it is true, they compute no attention.
        whole_queries: paths of attention modules whose queries every rank has whole, and whose keys are of `main`.
        after_whole: whether attention may be to keys that every rank has, which come before those of `main`: of tokens
            that are not split, and attend among themselves alone, or of a cache.
        kept: paths of attention modules -> an argument that is a cache, and its attributes where they leave keys and
            values [B, S, ...] of the main stream, of which it is to have those of all ranks.
        causal: the stream whose tokens attend to those before them in it, where the others attend to all.
        impossible: path of a module -> why a model that has it cannot be split.
        ordered: whether the order of `streams` is known.

    Raises:
        ValueError: a rule of another format, a stream that is none, or no rule that splits `main` as an argument.
    """

    modules: Mapping[str, ModulePlan]
    streams: tuple[str, ...] = ("encoder_hidden_states", "hidden_states")
    main: str = "hidden_states"
    alone: Mapping[str, str] = field(default_factory=dict)
    whole: tuple[str, ...] = ()
    whole_keys: tuple[str, ...] = ()
    whole_queries: tuple[str, ...] = ()
    main_asks: tuple[str, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)
    after_whole: bool = False
    kept: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    causal: str | None = None
    impossible: Mapping[str, str] = field(default_factory=dict)
    ordered: bool = True

    def __post_init__(self) -> None:
        for path, rule in self.modules.items():
            parts = rule.items() if isinstance(rule, Mapping) else [(None, rule)]
            if not all(self._fits(_name(key), how) for key, how in parts):
                raise ValueError(
                    f"{path!r}: {rule!r} cannot be in a context-parallel plan: a module's path goes with {{argument: "
                    "split(), number of an output: split(output=True)} or with gather(); a list of them may stand for "
                    "several tensors, but a stream of tokens is one"
                )
        unknown = {*self.alone.values(), *filter(None, [self.causal])} - {*self.streams, self.main}
        if unknown:
            raise ValueError(
                f"{', '.join(sorted(unknown))} is no stream of this context-parallel plan, whose streams are "
                f"{', '.join(self.streams)}"
            )
        arguments = {_name(key) for rule in self.modules.values() if isinstance(rule, Mapping) for key in rule}
        if self.main not in arguments:
            raise ValueError(
                f"this context-parallel plan splits no argument {self.main!r}, from which the length of the sequence "
                "is known: split it where a module takes it, or pass a ContextParallelPlan with another `main`"
            )

    def paths(self) -> dict[str, None]:
        """The modules that a model must have, in every rule but `impossible`."""
        besides = self.alone, self.whole, self.whole_keys, self.whole_queries, self.main_asks, self.idle, self.kept
        return dict.fromkeys(path for rules in (self.modules, *besides) for path in rules if path)

    def _fits(self, key: str | int | None, how: object) -> bool:
        """Can it stand beside the name of an argument, the number of an output, or, for None, a module's path?"""
        if isinstance(how, (list, tuple)):
            kind = type(None), ContextParallelOutput if key is None else ContextParallelInput
            allowed = not isinstance(key, int) and key not in self.streams
            return allowed and all(isinstance(each, kind) and not getattr(each, "split_output", False) for each in how)
        if key is None:
            return isinstance(how, ContextParallelOutput)
        if isinstance(how, (ByTokens, Refused, SplitAlready, KeyMask, LengthOf, AfterWhole)):
            return isinstance(key, str)
        if isinstance(how, Gather):
            return isinstance(key, str) and how.stream is not None
        return isinstance(how, ContextParallelInput) and how.split_output == isinstance(key, int)


def _name(key: str | int | None) -> str | int | None:
    return key.removesuffix("?") if isinstance(key, str) else key


def split(dim: int, dims: int | None, output: bool = False) -> ContextParallelInput:
    """Split a tensor of `dims` dims, any number if None, along `dim`."""
    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


def gather(dim: int = 1, dims: int = 3, stream: str | None = None, after_whole: bool = False) -> Gather:
    """Gather an output, or an argument, of `dims` dims along `dim`: of `main`, or of another stream of tokens."""
    return Gather(gather_dim=dim, expected_dims=dims, stream=stream, after_whole=after_whole)


def leading_count() -> ByTokens:
    """How many of the main stream's first tokens, which the model treats apart, are here."""
    return ByTokens(lambda count, total, start, stop: min(max(count - start, 0), stop - start))


def trailing_count() -> ByTokens:
    """How many of the main stream's last tokens are here."""
    return ByTokens(lambda count, total, start, stop: max(stop - max(start, total - count), 0))


def split_leading(dim: int) -> ByTokens:
    """A tensor for all streams, of which the main one, its first tokens, is whole and the rest is split already."""
    return ByTokens(
        lambda x, total, start, stop: torch.cat(
            [x.narrow(dim, start, stop - start), x.narrow(dim, total, x.shape[dim] - total)], dim
        )
    )


def split_trailing(dim: int) -> ByTokens:
    """A tensor for the main stream's last tokens only."""

    def function(x: Tensor, total: int, start: int, stop: int) -> Tensor:
        before = total - x.shape[dim]
        return x.narrow(dim, max(start - before, 0), max(stop - before, 0) - max(start - before, 0))

    return ByTokens(function)


def split_each_item(dim: int) -> ByTokens:
    """A tensor that holds, along `dim`, the main stream's tokens for each item of the batch, one after another."""
    return ByTokens(
        lambda x, total, start, stop: (
            x.unflatten(dim, (-1, total)).narrow(dim + 1, start, stop - start).flatten(dim, dim + 1)
        )
    )
