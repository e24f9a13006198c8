"""diffusers' caches where several ranks share a forward.

Some caches look at values to decide whether blocks are computed. Ranks that decide by their own tokens, rows or
rounding decide differently, and those that go on wait in a collective for those that do not: so all ranks that have a
part of the values decide together, by the same bits. Caches that go by the step decide alike anyway; but those that
keep one state for both branches of guidance need both.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_stacked, broadcast_from_first
from .context_parallel import split_of


class _Guidance(NamedTuple):
    axis: Axis
    by_rows: bool


_guidance: _Guidance | None = None  # of the call that runs


@contextlib.contextmanager
def guidance_shared(axis: Axis, by_rows: bool) -> Iterator[None]:
    """What runs inside is this rank's part of guidance: its rows of a call, or the call whose turn is its own."""
    global _guidance
    before, _guidance = _guidance, _Guidance(axis, by_rows)
    try:
        yield
    finally:
        _guidance = before


class _Shared(NamedTuple):
    """The axes over which a call of a block is shared; None for those of one rank."""

    model: Axis | None
    rows: Axis | None

    @classmethod
    def of(cls, block: nn.Module) -> "_Shared":
        split, rows = split_of(block), _guidance.axis if _guidance is not None and _guidance.by_rows else None
        if split is not None:
            return cls(split.model, rows)
        shardings = (getattr(module, "sharding", None) for module in block.modules())
        return cls(next((sharding.axis for sharding in shardings if sharding is not None), None), rows)

    def sum(self, x: Tensor) -> Tensor:
        """Over all ranks, the same bits on each. Ranks of tp have copies: only ratios of sums mean something."""
        for axis in self:
            x = x if axis is None else all_gather_stacked(x.to(axis.device), axis).sum(0)
        return x


def _shared_method(name: str, shared: Callable) -> Callable[[Callable], Callable]:
    """Wraps the `new_forward` of a hook, whose method `name` then goes to `shared` where ranks share the block."""

    @torch.compiler.disable
    def method(hook: Any, block: nn.Module, *args) -> Any:
        over = _Shared.of(block)
        return shared(hook, over, *args) if any(over) else getattr(type(hook), name)(hook, *args)

    def wrap(original: Callable) -> Callable:
        @functools.wraps(original)
        def new_forward(self, module: nn.Module, *args, **kwargs):
            setattr(self, name, functools.partial(method, self, module))
            return original(self, module, *args, **kwargs)

        return new_forward

    return wrap


def _should_compute(hook: Any, over: _Shared, *args: Any) -> bool:
    """diffusers' ratio of mean absolute values, rounded as there."""
    residual = args[-1]  # after the block, where diffusers makes ranks agree itself (upstream_pr/02_first_block_cache)
    before = hook.state_manager.get_state().head_block_residual
    if before is None:
        return True
    sums = [x.abs().sum(dtype=torch.float32) for x in (residual - before, before)]
    moved, size, count = over.sum(torch.stack([*sums, torch.full_like(sums[0], residual.numel())]))
    ratio = (moved / count).to(residual.dtype) / (size / count).to(residual.dtype)
    return ratio.item() > hook.threshold


def _calibrate(hook: Any, over: _Shared, state: Any, residual: Tensor) -> None:
    """diffusers' mean over this rank's tokens becomes that over all."""
    type(hook)._perform_calibration_step(hook, state, residual)
    tokens = residual[..., 0].numel()
    total, count = over.sum(torch.tensor([state.calibration_ratios.pop() * tokens, tokens])).tolist()
    state.calibration_ratios.append(total / count)


def _indicator(hook: Any, over: _Shared, metadata: Any) -> list[Tensor] | None:
    """The filtered latents of all rows, by which the leader decides; those of the first rank."""
    indicator = type(hook)._build_indicator(hook, metadata)
    if indicator is None:
        return None
    if over.model is not None:
        indicator = broadcast_from_first(indicator, over.model)
    if over.rows is not None:
        indicator = [*all_gather_stacked(torch.stack(indicator), over.rows).flatten(0, 1)]
    return indicator


wrap_first_block = _shared_method("_should_compute_remaining_blocks", _should_compute)
wrap_mag_cache_block = _shared_method("_perform_calibration_step", _calibrate)
wrap_sea_cache_leader = _shared_method("_build_indicator", _indicator)


def wrap_one_state(original: Callable) -> Callable:
    """`new_forward` of a hook that counts calls and keeps answers without asking which branch they are of."""

    @functools.wraps(original)
    def new_forward(self, module: nn.Module, *args, **kwargs):
        if _guidance is not None and not _guidance.by_rows:
            raise _needs_both(type(self).__name__.partition("Hook")[0].removesuffix("Block"))
        return original(self, module, *args, **kwargs)

    return new_forward


def wrap_faster_cache_denoiser(original: Callable) -> Callable:
    """`FasterCacheDenoiserHook.new_forward`, which makes one branch of guidance of the other."""

    @functools.wraps(original)
    def new_forward(self, module: nn.Module, *args, **kwargs):
        if _guidance is not None and not self.is_guidance_distilled:
            raise _needs_both("FasterCache")
        return original(self, module, *args, **kwargs)

    return new_forward


def _needs_both(cache: str) -> ValueError:
    return ValueError(
        f"{cache} answers one branch of guidance by the other, and with cfg={_guidance.axis.size} no rank has both; "
        "use ring, ulysses or tp in place of cfg, or a cache that keeps the branches apart (FirstBlockCache, "
        "MagCache, TaylorSeer)"
    )
