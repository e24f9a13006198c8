"""What a tensor-parallel plan is: data that says, path by path, how a model's modules are split."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ...distributed.sharding import Block, Shard, granule


# A number, or the key of a model's config that holds it, or how it follows from the config.
Size = int | str | Callable[[Mapping[str, Any]], int]


@dataclass(frozen=True)
class TokenSlicePlan:
    """Where the tokens of a model, whose products are sharded, may be in slices (`hooks.token_slices`).

    What comes of its row products goes to the slices, each by itself: norms, modulation, gates and sums. Attention and
    what column products read is of all tokens.

    Attributes:
        streams: arguments that are sequences of tokens [B, S, ...], in the order in which modules join them.
        sliced: path of the module that they are arguments of; the model by default.
        besides: arguments of it, or lists, that are added to them.
        not_with: an argument of the model -> whether it is such that slices cannot go with it; None never is.
        whole: path of a module -> its arguments, or the number of its output, of which all tokens are needed. The
            first come first.
        sliced_again: paths of modules that are given all tokens, and whose output is sliced: their products are
            gathered.
        joined: path of a module of joined streams -> an argument that goes with their tokens, along dim 0.
        gathered: path of the module whose output is the model's.
        together: paths of the Linears that read the same input, of each block, and are made together.
        alongside: path of the first of them -> of a Linear that is made with them where attention sends nothing, which
            it could be beside.
        processors: the classes that attention's processors may be of: these read their input by its column products
            alone, and end with the row products.
        ends: path of a module -> paths in it of the row products that make its first outputs, each of its own.
    """

    streams: tuple[str, ...]
    whole: Mapping[str, tuple[str | int, ...]]
    gathered: str
    processors: tuple[type, ...]
    sliced: str = ""
    besides: tuple[str, ...] = ()
    not_with: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    sliced_again: tuple[str, ...] = ()
    joined: Mapping[str, str] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    alongside: Mapping[str, str] = field(default_factory=dict)
    ends: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class TensorParallelPlan:
    """A mapping of module paths to styles, for one or more model classes.

    Attributes:
        rules: path -> style. In a path `*` stands for one component (an index), and a trailing `?` marks a rule whose
            module need not exist (fused projections). Styles are those of `hooks.tensor_parallel.STYLES`, each with
            an argument after a colon where it takes one: `"column:heads"`, `"row:heads+mlp"`.
        heads: block name -> (number of heads, elements per head): each a number, a key of the model's config, or a
            function of it. Where several query heads share a key and a value, the queries are dealt in such groups.
            The remaining elements of a dim belong to its `mlp` blocks.
        embedding: path of the module whose output, through SiLU, is the input of all `modulation` Linears, or a
            function of the config that gives it; None where there is none, and each Linear gathers its own output.
        activated: whether that output is their input as it is.
        impossible: why some models cannot be sharded -> whether one of this config is such.
        token_slices: where tokens may be in slices; None where that is not known.
    """

    rules: Mapping[str, str]
    heads: Mapping[str, tuple[Size, Size]] = field(
        default_factory=lambda: {"heads": ("num_attention_heads", "attention_head_dim")}
    )
    embedding: str | Callable[[Mapping[str, Any]], str | None] | None = None
    activated: bool = False
    impossible: Mapping[str, Callable[[Mapping[str, Any]], bool]] = field(default_factory=dict)
    token_slices: TokenSlicePlan | None = None

    def embedding_path(self, config: Mapping[str, Any]) -> str | None:
        """`embedding` of a model with this config."""
        return self.embedding(config) if callable(self.embedding) else self.embedding

    def head_counts(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Block name -> number of heads: no more ranks than the fewest of them can share the model."""
        return {name: _value(count, config) for name, (count, _) in self.heads.items()}

    def attributes(self, layouts: str, module: nn.Module, config: Mapping[str, Any], world: int) -> dict[str, Shard]:
        """Attribute of the module -> layout of what it counts, for `"heads=heads,inner_dim=heads"`, say.

        Or, where it is a parameter, the layout of its first dim. One that the module lacks is left out, and so is a
        parameter of one element, which all heads share.
        """
        shards = {}
        for each in layouts.split(","):
            name, _, layout = each.partition("=")
            if not name or not layout:
                raise ValueError(f"{layouts!r} names no attributes of a {type(module).__name__}: 'heads=heads', say")
            value = getattr(module, name, None)
            if value is None or isinstance(value, nn.Parameter) and value.numel() == 1:
                continue
            if layout in self.heads:
                shards[name] = self.head_shard(layout, config)
            else:
                shards[name] = Shard(0, self.blocks(layout, value, config, world))
        return shards

    def slices(self, layouts: str, module: nn.Module, config: Mapping[str, Any], world: int) -> dict[str, Shard]:
        """Parameter of the module -> its layout, for `"gate=0/heads,down_proj=1/mlp"`: dim 0 is dealt as the heads."""
        shards = {}
        for each in layouts.split(","):
            name, _, where = each.partition("=")
            dim, _, layout = where.partition("/")
            size = getattr(module, name).shape[int(dim)]
            if layout in self.heads:
                blocks = (Block(size, size // _value(self.heads[layout][0], config)),)
            else:
                blocks = self.blocks(layout, size, config, world)
            shards[name] = Shard(int(dim), blocks)
        return shards

    def head_shard(self, name: str, config: Mapping[str, Any]) -> Shard:
        """The layout of a dim that holds these heads and nothing else."""
        count, dim = (_value(size, config) for size in self.heads[name])
        return Shard(0, (Block(count * dim, dim),))

    def blocks(self, layout: str, size: int, config: Mapping[str, Any], world: int) -> tuple[Block, ...]:
        """The blocks of a dim of `size` elements that `layout` describes: `"heads+mlp"`, say, or `"heads*"`, which is
        `"heads+heads+..."` as often as it fits.

        Raises:
            ValueError: the layout does not add up to `size`.
        """
        names = layout.split("+")
        if layout.endswith("*"):
            count, dim = (_value(size, config) for size in self.heads[layout[:-1]])
            names = [layout[:-1]] * (size // (count * dim))
        sizes, units = [], []
        for name in names:
            if name == "mlp":
                sizes.append(0)
                units.append(0)
            elif name in self.heads:
                count, dim = (_value(size, config) for size in self.heads[name])
                sizes.append(count * dim)
                units.append(dim)
            else:
                raise ValueError(f"unknown block {name!r} in {layout!r}; known: mlp, {', '.join(self.heads)}")
        rest, mlps = size - sum(sizes), names.count("mlp")
        if rest < 0 or (rest and not mlps) or (mlps and rest % mlps):
            raise ValueError(f"{layout!r} does not add up to {size} elements: the heads take {sum(sizes)}")
        for index, name in enumerate(names):
            if name == "mlp":
                sizes[index] = rest // mlps
                units[index] = granule(sizes[index], world)
        return tuple(Block(size, unit) for size, unit in zip(sizes, units, strict=True))


def _value(size: Size, config: Mapping[str, Any]) -> int:
    if isinstance(size, int):
        return size
    return config[size] if isinstance(size, str) else size(config)


def at(prefix: str, rules: Mapping[str, str], optional: bool = False) -> dict[str, str]:
    """The rules of a building block, moved below `prefix`; `optional` where not every model of the class has it."""
    moved = {f"{prefix}.{path}" if path else prefix: style for path, style in rules.items()}
    return {f"{path.removesuffix('?')}?": style for path, style in moved.items()} if optional else moved


def unmatched(model: nn.Module, rules: Mapping[str, Any]) -> list[str]:
    """The rules that should have met a module of this model, and did not."""
    return [
        rule
        for rule, _, found in match(model, rules)
        if not found and not rule.endswith("?") and not _runs_through_nothing(model, rule)
    ]


def _runs_through_nothing(model: nn.Module, rule: str) -> bool:
    """Does the rule speak of the members of a list that is empty in this model (`num_single_layers=0`, say)?"""
    parent, star, _ = rule.partition(".*")
    try:
        container = model.get_submodule(parent)
    except AttributeError:
        return False
    return bool(star) and isinstance(container, nn.ModuleList) and len(container) == 0


def match(model: nn.Module, rules: Mapping[str, Any]) -> Iterator[tuple[str, Any, list[tuple[str, nn.Module]]]]:
    """`(rule, what it says, [(path, module), ...])` for every rule, in order.

    An index in a rule may count from a list's end: -1, or -KEY for a number in the model's config.
    """
    modules = [(path, path.split("."), module) for path, module in model.named_modules()]
    for rule, style in rules.items():
        pattern = rule.removesuffix("?").split(".")
        for index, part in enumerate(pattern):
            if part.startswith("-"):
                if not part[1:].isdigit() and part[1:] not in model.config:
                    raise ValueError(f"{rule}: the config of {type(model).__name__} has no {part[1:]}")
                back = int(part[1:]) if part[1:].isdigit() else model.config[part[1:]]
                pattern[index] = str(len(model.get_submodule(".".join(pattern[:index]))) - back)
        found = [
            (path, module)
            for path, parts, module in modules
            if len(parts) == len(pattern)
            and all(want in ("*", part) for want, part in zip(pattern, parts, strict=True))
        ]
        yield rule, style, found
