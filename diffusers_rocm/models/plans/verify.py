"""What a plan does to a model, in bytes: checked by the tests, printed by `diffusers-rocm plan --explain`."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from ...hooks.tensor_parallel import STYLES, resolve, sharded_modules
from . import get_tensor_parallel_plan
from .plan import match, unmatched


@dataclass(frozen=True)
class PlanReport:
    """The answer of `verify_plan`.

    Attributes:
        full_bytes: all parameters and buffers of the model.
        rank_bytes: what each rank holds, in rank order.
        replicated_bytes: what every rank holds whole.
        unexplained: parameters and buffers of it that no rule gives a reason for -> bytes.
        reasons: path -> (bytes, why it is whole), from the plan's `replicate` rules.
        unused_rules: rules that match nothing, other than those marked as optional.
        unsharded_linears: Linears that no rule names.
    """

    model: str
    tp: int
    full_bytes: int
    rank_bytes: tuple[int, ...]
    replicated_bytes: int
    unexplained: dict[str, int]
    reasons: dict[str, tuple[int, str]]
    unused_rules: tuple[str, ...]
    unsharded_linears: tuple[str, ...]

    @property
    def unexplained_bytes(self) -> int:
        """What every rank holds whole, and no rule says why."""
        return sum(self.unexplained.values())

    def __str__(self) -> str:
        largest, full = max(self.rank_bytes) / 1e9, self.full_bytes / 1e9
        lines = [
            f"{self.model}, tp={self.tp}: at most {largest:.3f} GB a rank, of {full:.3f} GB; an even share would be "
            f"{full / self.tp:.3f} GB",
            f"replicated on every rank: {self.replicated_bytes / 1e6:.1f} MB, of which without a reason: "
            f"{self.unexplained_bytes / 1e6:.1f} MB",
        ]
        whole: dict[tuple[str, str], int] = {}
        for path, (size, why) in self.reasons.items():
            whole[_pattern(path), why] = whole.get((_pattern(path), why), 0) + size
        lines += [f"  {path}: {size / 1e6:.1f} MB, {why}" for (path, why), size in whole.items()]
        rest: dict[str, int] = {}
        for path, size in self.unexplained.items():
            rest[_pattern(path)] = rest.get(_pattern(path), 0) + size
        largest_first = sorted(rest.items(), key=lambda item: -item[1])
        lines += [f"  without a reason: {path}, {size / 1e6:.1f} MB" for path, size in largest_first if size >= 1e5]
        lines += [f"  rule that matches nothing: {rule}" for rule in self.unused_rules]
        lines += [f"  Linear without a rule: {path}" for path in dict.fromkeys(map(_pattern, self.unsharded_linears))]
        return "\n".join(lines)


def _pattern(path: str) -> str:
    """The path with `*` for the index of a block."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def verify_plan(model: nn.Module, tp: int, linear_bytes: float | None = None) -> PlanReport:
    """Lay the model's plan over `tp` ranks without changing anything; a model on meta will do.

    Args:
        linear_bytes: of each element of a Linear's weight, where those are to be quantised.

    Raises:
        ValueError: the class has no plan, the degree cannot be had, or the model is sharded already.
    """
    if not isinstance(tp, int) or isinstance(tp, bool) or tp < 1:
        raise ValueError(f"tp must be a whole number of ranks, at least 1; got {tp!r}")
    if next(sharded_modules(model), None) is not None:
        raise ValueError(f"this {type(model).__name__} is sharded already; verify the whole model")
    linears = {path: module for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    quantized = {id(module.weight) for module in linears.values() if linear_bytes is not None}

    def nbytes(tensors: Iterable[Tensor]) -> int:
        sizes = ((linear_bytes if id(x) in quantized else x.element_size()) * x.numel() for x in tensors)
        return round(sum(sizes))

    plan = get_tensor_parallel_plan(type(model))
    unused = tuple(unmatched(model, plan.rules))
    fitting = {rule: style for rule, style in plan.rules.items() if rule not in unused}
    placements = resolve(model, replace(plan, rules=fitting), tp)

    reasons, explained = {}, set()
    for _, style, found in match(model, plan.rules):
        kind, _, reason = style.partition(":")
        if kind != "replicate":
            continue
        for path, module in found:
            tensors = [*module.parameters(), *module.buffers()]
            explained |= {id(tensor) for tensor in tensors}
            reasons[path] = (nbytes(tensors), reason)

    rank_bytes, cut = [0] * tp, set()
    for placement in placements:
        for name, shard in placement.shards.items():
            tensor = getattr(placement.module, name)
            cut.add(id(tensor))
            for rank in range(tp):
                if shard.dim is None:
                    rank_bytes[rank] += nbytes([tensor]) if rank == 0 else 0
                else:
                    rank_bytes[rank] += nbytes([tensor]) * shard.size(rank, tp) // tensor.shape[shard.dim]
    tensors = [*model.parameters(), *model.buffers()]
    whole = [tensor for tensor in tensors if id(tensor) not in cut]
    # Norms within a head and the like are named by a rule too: what they hold is meant to be whole.
    changed = [each.module for each in placements if STYLES[each.style].becomes and each.style != "local_input"]
    named = {id(tensor) for module in changed for tensor in module.parameters()}
    names = {id(x): path for path, x in (*model.named_parameters(), *model.named_buffers())}
    return PlanReport(
        model=type(model).__name__,
        tp=tp,
        full_bytes=nbytes(tensors),
        rank_bytes=tuple(size + nbytes(whole) for size in rank_bytes),
        replicated_bytes=nbytes(whole),
        unexplained={names[id(x)]: nbytes([x]) for x in whole if id(x) not in explained | named},
        reasons=reasons,
        unused_rules=unused,
        unsharded_linears=tuple(path for path, module in linears.items() if id(module.weight) not in cut | explained),
    )
