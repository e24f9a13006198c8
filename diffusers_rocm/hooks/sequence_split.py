"""What the hooks and the attention of a split model share: its streams' lengths, and the way to the schedules."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..distributed.axis import Axis
from ..distributed.choices import goes_by_copies
from ..distributed.collectives import copy_to_axis, gather_from_axis
from ..distributed.links import reaches_memory
from ..distributed.mesh import Axes
from ..models.attention_dispatch import choose_kernel
from ..models.attention_kernels import Kernel
from ..models.attention_parallel import Layout, attention, attention_after_whole_keys, attention_of_whole_queries
from ..models.plans.context_plan import ByTokens, ContextParallelPlan
from .stand_in import stands_in_for


def _choose(asked: Kernel | str | None, q: Tensor, mask: Tensor | None, needs_lse: bool) -> Kernel:
    if not isinstance(asked, Kernel):
        return choose_kernel(q, mask, asked)
    if needs_lse and not asked.gives_lse:
        raise ValueError(
            f"attention backend {asked.name!r} gives no log-sum-exp, by which a ring merges its parts; use "
            'rotate_method="allgather", ulysses_degree, or set_attention_backend("native")'
        )
    return asked


class SequenceSplit:
    """What the hooks and the attention of one model share: the axes, and the lengths of the forward that runs.

    A processor of diffusers that has it as its `_parallel_config` sends its attention here through the dispatch.
    """

    # What diffusers splits by; nothing: what a processor is told of lengths here is of this rank's tokens already.
    context_parallel_config = None

    def __init__(self, name: str, plan: ContextParallelPlan, axes: Axes, rotate_method: str):
        self.name, self.plan, self.rotate_method = name, plan, rotate_method
        self.cp, self.ring, self.ulysses, self.model = axes.context, axes.ring, axes.ulysses, axes.model
        self.lengths: dict[str, int] = {}  # of each stream, in this forward
        self.leading = 0  # tokens before those of the main stream, which every rank has, in this forward
        self.gathered = False  # the main stream, in this forward
        self.reached = False  # by the attention module that runs
        self.window: int | None = None  # of that module
        self.keys_are_whole = False  # those of the attention that comes next
        self.queries_are_whole = False  # the same of its queries
        self.key_mask: Tensor | None = None  # over the joined sequence, of the block that runs
        self._masked_items = 0  # of the batch, for which attention has taken it
        self.main_asks = False  # alone, and all streams answer, in attention of that module
        self.alone: str | None = None  # the only stream that the attention module that runs is over

    def by_copies(self, wanted: bool) -> bool:
        """Have messages go by copies, where ranks of an axis reach each other's memory, or no longer; all call it.

        Returns:
            Whether some go so.
        """

        def reached(axis: Axis) -> Axis:
            return replace(axis, peer_memory=wanted and goes_by_copies(axis) and reaches_memory(axis))

        self.ring, self.ulysses = reached(self.ring), reached(self.ulysses)
        return self.ring.peer_memory or self.ulysses.peer_memory

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
        length = x.shape[how.split_dim]
        if length == 1 and not stream:
            return x
        if length < self.cp.size:
            raise ValueError(
                f"{self.name}: {what} has {length} tokens, too few to split over {self.cp.size} ranks; use a degree "
                f"of at most {length}"
            )
        return self.layout_of(length).take(x, how.split_dim, self.cp.rank)

    def layout_of(self, *streams: int) -> Layout:
        """Of streams of these lengths, joined."""
        return Layout(streams, self.ring, self.ulysses)

    def by_tokens(self, value: Any, how: ByTokens) -> Any:
        """`value` as it goes with this rank's tokens of the main stream."""
        total = self.lengths[self.plan.main]
        ((start, stop),) = self.layout_of(total).runs(self.cp.rank)
        return how.function(value, total, start, stop)

    def after_whole(self, x: Tensor, dim: int, what: str) -> Tensor:
        """What is before the main stream's tokens, and this rank's run of them."""
        whole, tokens = x.split([x.shape[dim] - self.lengths[self.plan.main], self.lengths[self.plan.main]], dim)
        part = self.split(tokens, ContextParallelInput(dim), what, stream=True)
        return torch.cat([whole, part], dim)

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
        self.gathered |= stream == self.plan.main
        length = self.lengths.get(stream)
        sizes = self.layout_of(length).lengths() if length is not None else ()
        if sizes and getattr(how, "after_whole", False):
            whole, x = x.split([x.shape[how.gather_dim] - sizes[self.cp.rank], sizes[self.cp.rank]], how.gather_dim)
            everything = copy_to_axis(gather_from_axis(x, sizes, self.cp, how.gather_dim), self.cp)
            return torch.cat([whole, everything], how.gather_dim)
        if not sizes or x.shape[how.gather_dim] != sizes[self.cp.rank]:
            raise ValueError(
                f"{self.name}: {what} is {[*x.shape]}, which is not this rank's part of {stream} "
                f"({length} tokens over {self.cp.size} ranks); the plan does not fit the model"
            )
        return copy_to_axis(gather_from_axis(x, sizes, self.cp, how.gather_dim), self.cp)

    def layout(self, queries: int, keys: int) -> Layout:
        """Of all streams that this forward split, joined, or of the main one: whichever has this many tokens here."""
        streams = tuple(self.lengths[stream] for stream in self.plan.streams if stream in self.lengths)
        candidates = [self.layout_of(*streams)] if streams else []
        if self.alone is not None:
            candidates = [self.layout_of(self.lengths[self.alone])]
        elif self.plan.main in self.lengths:
            candidates.append(self.layout_of(self.lengths[self.plan.main]))
        for layout in candidates:
            if queries == keys == layout.lengths()[self.cp.rank]:
                return layout
        held = [layout.lengths()[self.cp.rank] for layout in candidates]
        raise ValueError(
            f"{self.name}: attention of {queries} queries to {keys} keys, but rank {self.cp.rank} holds {held} tokens "
            f"of the sequences {self.lengths}; attention to keys that are not split belongs in the plan's `whole`"
        )

    def _among_all(self, q: Tensor) -> tuple[Tensor, int]:
        """The main stream's queries in the place that they have among those of all streams, and where that begins."""
        streams = [stream for stream in self.plan.streams if stream in self.lengths]
        held = [self.layout_of(self.lengths[each]).lengths()[self.cp.rank] for each in streams]
        at = streams.index(self.plan.main)
        before, after = sum(held[:at]), sum(held[at + 1 :])
        return F.pad(q, (0, 0, 0, 0, before, after)), before

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
        choose = functools.partial(_choose, kernel)
        if self.keys_are_whole:
            self.keys_are_whole = False
            out, _ = choose(q, mask, False)(q, k, v, mask, scale, is_causal)
            return out
        if self.queries_are_whole:
            if mask is not None or is_causal:
                raise ValueError(f"{self.name}: attention of whole queries to split keys takes no mask")
            layout = self.layout_of(self.lengths[self.plan.main])
            return attention_of_whole_queries(q, k, v, scale, layout, self.cp, choose)
        if self.plan.after_whole and k.shape[1] <= self.leading:
            out, _ = choose(q, mask, False)(q, k, v, mask, scale, is_causal)
            return out
        if self.plan.after_whole and k.shape[1] > q.shape[1]:
            layout = self.layout(q.shape[1], q.shape[1])
            return attention_after_whole_keys(q, k, v, mask, scale, layout, choose)
        if self.main_asks and q.shape[1] != k.shape[1]:
            among, start = self._among_all(q)
            return self.attend(among, k, v, mask, scale, is_causal, kernel).narrow(1, start, q.shape[1])
        if self.key_mask is not None:
            mask = self._next_mask(q.shape[0])
        if self.window is not None and mask is None:
            raise ValueError(
                f"{self.name}: attention in a sliding window over several ranks needs the model's mask, which it does "
                'not make for flash backends; use set_attention_backend("native")'
            )
        if is_causal and self.plan.causal is not None:
            layout = self.layout_of(self.lengths[self.plan.causal])
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
        if func is Tensor.unflatten:  # the compiler cannot follow its call of super() in a mode
            return torch.unflatten(*args, **kwargs)
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
        """Be as it was, until `resume()`."""
        if self._in_dispatch:
            self._processor._parallel_config = self._before
        else:
            self._processor.__class__ = self._cls
            del self._processor.sequence_split

    remove = pause
