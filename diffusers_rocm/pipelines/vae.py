"""The VAE of a pipeline on the ranks that share a picture: its tiles spread over them, or all of it on the first.

What a VAE does around its decoder (tiles, slices, chunks of frames, the blending of overlaps) is its own, unmodified
code, which runs twice. In the first pass each rank computes its share of the decoder's calls, and every call is
answered by a tensor without elements, which blends and concatenates at no cost. The ranks gather what they computed;
in the second pass all calls are answered with that, in their order.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.models.autoencoders.vae import DecoderOutput
from torch import Tensor, nn

from ..distributed.agreement import agree, fail_together
from ..distributed.axis import Axis
from ..distributed.collectives import all_gather_int64, all_gather_stacked, broadcast_from_first
from ..hooks.around_call import AroundCall
from ..hooks.stand_in import stands_in_for
from .first_rank import answer_of_first_rank


# Their loops are known to do nothing between the decoder's calls that needs more of an answer than its dimensions.
TILED = (
    "AutoencoderDC",
    "AutoencoderKL",
    "AutoencoderKLCogVideoX",
    "AutoencoderKLFlux2",
    "AutoencoderKLHunyuanVideo",
    "AutoencoderKLHunyuanVideo15",
    "AutoencoderKLLTX2Video",
    "AutoencoderKLLTXVideo",
    "AutoencoderKLQwenImage",
    "AutoencoderKLWan",
)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def check_tiles(name: str) -> None:
    """Raises ValueError for the class of a VAE whose tiles cannot be shared."""
    if name not in TILED:
        raise ValueError(f"vae='tile' does not know the tiles of {name}, only of {', '.join(TILED)}; use 'first-rank'")


def check_vae(pipe: DiffusionPipeline, mode: str) -> None:
    """Raises ValueError where the VAE of the pipeline cannot be had so."""
    if mode == "replicate":
        return
    vae = getattr(pipe, "vae", None)
    if vae is None:
        raise ValueError(f"vae={mode!r}: this {type(pipe).__name__} has no VAE; use vae='replicate'")
    name = type(vae).__name__
    if hasattr(vae, "parallel_decode"):
        raise ValueError(f"this {name} is parallel already, with another pipeline; use vae='replicate' for this one")
    if "decode" in vars(vae):
        raise ValueError(f"vae={mode!r}: the decode of this {name} was replaced; compile its decoder in place instead")
    if mode != "tile":
        return
    check_tiles(name)
    noise = vae.config.get("decoder_inject_noise", False)
    if any(noise) if isinstance(noise, (list, tuple)) else noise:
        raise ValueError(
            f"vae='tile': the decoder of this {name} draws noise (decoder_inject_noise), tile after tile from one "
            "generator, which ranks cannot share; use 'first-rank'"
        )


def share_vae(vae: nn.Module, mode: str, axis: Axis) -> "SharedVAE":
    """Hang on a VAE, checked by `check_vae`, what `mode` means: `"first-rank"` or `"tile"`."""
    return (TiledVAE if mode == "tile" else FirstRankVAE)(vae, axis)


class SharedVAE:
    """Hangs on a VAE, around its `decode`, until `remove()`. All ranks of the axis call it, and get all of the sample.

    There are no gradients, and everything else of the VAE, encoding included, is as it was.
    """

    def __init__(self, vae: nn.Module, axis: Axis):
        self._vae, self._axis = vae, axis
        vae.parallel_decode = self
        vae.__class__ = _shared_class(type(vae))

    def remove(self) -> None:
        self._vae.__class__ = type(self._vae).__base__
        del self._vae.parallel_decode

    def decode(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> DecoderOutput | tuple[Tensor]:
        """Stands for `call(*args, **kwargs)`.

        Raises:
            ValueError: latents that require gradients.
            RuntimeError: another rank failed.
        """
        if torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args, kwargs).values()):
            call = self._refuse_gradients  # in its turn, where the ranks fail together
        with torch.no_grad():
            return self._decode(call, args, kwargs)

    def _refuse_gradients(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(f"a {type(self._vae).__name__} that ranks share has no gradients; detach the latents")

    def _decode(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> DecoderOutput | tuple[Tensor]:
        raise NotImplementedError


def _tensors(args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    named = {f"argument {index}": x for index, x in enumerate(args)} | kwargs
    return {name: x for name, x in named.items() if isinstance(x, Tensor)}


@functools.cache
def _shared_class(cls: type[nn.Module]) -> type[nn.Module]:
    @stands_in_for(cls)
    class Shared(cls):
        @functools.wraps(cls.decode)
        def decode(self, *args, **kwargs):
            return self.parallel_decode.decode(super().decode, args, kwargs)

    return Shared


class FirstRankVAE(SharedVAE):
    """The first rank of the axis decodes, the others receive."""

    def _decode(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> DecoderOutput | tuple[Tensor]:
        return answer_of_first_rank("decode", call, args, kwargs, self._axis)


class TiledVAE(SharedVAE):
    """Each rank of the axis decodes some of the tiles: with the VAE's tiling on, whether or not it is otherwise.

    The sample is bit for bit what one process' tiled decode makes of the same latents.
    """

    def __init__(self, vae: nn.Module, axis: Axis):
        super().__init__(vae, axis)
        self._calls = _SharedCalls(vae.decoder, axis)

    def remove(self) -> None:
        self._calls.remove()
        super().remove()

    def _decode(self, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> DecoderOutput | tuple[Tensor]:
        vae = self._vae
        tiling, vae.use_tiling = vae.use_tiling, True
        try:
            settings = {name: x for name, x in vars(vae).items() if isinstance(x, (int, float)) and name[0] != "_"}
            if not agree(f"inputs to {type(vae).__name__}.decode()", settings | _tensors(args, kwargs), self._axis):
                args, kwargs = broadcast_from_first((args, kwargs), self._axis)
            return self._calls.share(functools.partial(call, *args, **kwargs))
        finally:
            vae.use_tiling = tiling


class _SharedCalls(AroundCall):
    """Stands before a decoder whose calls the ranks of an axis share.

    Causal decoders take a tile in chunks of frames, and keep from one call for the next what a convolution in time
    looks back on: all calls of a tile are one rank's. Wan and Qwen-Image fill a list, `feat_cache`, which is another
    for each tile; CogVideoX answers with a `conv_cache`, and is called without one for the first chunk.
    """

    def __init__(self, decoder: nn.Module, axis: Axis):
        super().__init__(decoder)
        self._axis = axis
        self._answer: Callable[..., Any] | None = None

    def around(self, call: Callable, args: tuple, kwargs: dict) -> Any:
        return call(*args, **kwargs) if self._answer is None else self._answer(call, *args, **kwargs)

    def share(self, loop: Callable[[], Any]) -> Any:
        """`loop()`, which calls the decoder; on all ranks, with equal inputs.

        Raises:
            RuntimeError: another rank failed.
        """
        if self._axis.size == 1:
            return loop()
        try:
            with fail_together("decode its tiles", self._axis):
                self._owners: list[int] = []  # of each call
                self._mine: list[Tensor] = []
                self._load, self._cache = [0] * self._axis.size, None
                self._answer = self._compute
                loop()
                rows = [_describe(x) for x in self._mine]
            self._gathered = iter(_gather(self._mine, rows, self._owners, self._axis))
            self._answer = self._hand_out
            return loop()
        finally:
            self._answer = self._mine = self._cache = self._gathered = None

    def _compute(self, call: Callable, x: Tensor, *args, **kwargs) -> Any:
        chained, cache = "conv_cache" in kwargs, kwargs.get("feat_cache", kwargs.get("conv_cache"))
        if cache is None or cache is not self._cache:
            # The next tile is of the rank that has least to do: those at the edges are smaller.
            self._owner = self._load.index(min(self._load))
        self._owners.append(self._owner)
        self._load[self._owner] += x.numel()
        if self._owner == self._axis.rank:
            output = call(x, *args, **kwargs)
            output, cache = output if chained else (output, cache)
            self._mine.append(output)
        elif chained:
            cache = {}
        self._cache = cache
        nothing = x.new_empty(x.shape[0], *[0] * (x.ndim - 1))
        return (nothing, cache) if chained else nothing

    def _hand_out(self, call: Callable, x: Tensor, *args, **kwargs) -> Any:
        output = next(self._gathered).to(x.device)
        return (output, None) if "conv_cache" in kwargs else output


# A tensor's dtype, number of dimensions and shape, as integers.
_ROW = 8


def _describe(x: Tensor) -> Tensor:
    row = torch.zeros(_ROW, dtype=torch.int64)
    row[: 2 + x.ndim] = torch.tensor([_DTYPES.index(x.dtype), x.ndim, *x.shape])
    return row


def _read(row: Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    dtype, ndim, *shape = row.tolist()
    return _DTYPES[dtype], tuple(shape[:ndim])


def _gather(mine: list[Tensor], rows: list[Tensor], owners: list[int], axis: Axis) -> list[Tensor]:
    """The tensors of all ranks, of one dtype, in the order of their `owners`.

    Args:
        mine: those of this rank; the list is emptied.
        rows: their descriptions.
    """
    table = torch.zeros(len(owners), _ROW, dtype=torch.int64)
    if rows:
        table[[owner == axis.rank for owner in owners]] = torch.stack(rows)
    table = all_gather_int64(table.flatten(), axis).sum(0).view(-1, _ROW)
    dtype, _ = _read(table[0])
    shapes, starts, totals = [_read(row)[1] for row in table], [], [0] * axis.size
    for owner, shape in zip(owners, shapes, strict=True):
        starts.append(totals[owner])
        totals[owner] += math.prod(shape)
    buffer, start = torch.empty(max(totals), dtype=dtype, device=axis.device), 0
    while mine:
        x = mine.pop(0)
        buffer[start : start + x.numel()] = x.flatten()
        start += x.numel()
    parts, places = all_gather_stacked(buffer, axis), zip(owners, starts, shapes, strict=True)
    return [parts[owner, start : start + math.prod(shape)].view(shape) for owner, start, shape in places]
