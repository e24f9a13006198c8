"""Attention kernels that return their log-sum-exp.

A kernel computes `softmax(scale * q @ k^T + mask) @ v` for `q` [B, Sq, H, D] and `k`, `v` [B, Sk, H, D]. It returns
the output [B, Sq, H, D] and the logarithm of the softmax' denominator, the log-sum-exp (LSE) [B, Sq, H], by which
outputs over parts of the keys are merged. Every backend has its own idea of the LSE's shape; `normalise` settles it
here, once. Kernels know nothing of ranks.
"""

import functools
import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from diffusers.models.attention_dispatch import _HUB_KERNELS_REGISTRY, AttentionBackendName
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention

from ..distributed.collectives import needs_grad


HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Platform:
    """What a kernel's limits depend on.

    Attributes:
        name: "cuda", "rocm", "cpu", or torch's name of another device.
        capability: CUDA's compute capability; (0, 0) elsewhere.
        architecture: AMD's, `"gfx942"`.
        lacks: kernels that torch has, and refuses on this architecture.
    """

    name: str
    capability: tuple[int, int] = (0, 0)
    architecture: str = ""
    lacks: tuple[str, ...] = ()


@functools.cache
def platform_of(device_type: str) -> Platform:
    """The platform of this process' device of that type."""
    if device_type != "cuda":
        return Platform(device_type)
    if torch.version.hip is not None:
        architecture = torch.cuda.get_device_properties().gcnArchName.partition(":")[0]
        q = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16, device=device_type)
        asked = SDPAParams(q, q, q, None, 0.0, False, False)
        can = {"flash": can_use_flash_attention(asked), "efficient": can_use_efficient_attention(asked)}
        return Platform("rocm", architecture=architecture, lacks=tuple(name for name in can if not can[name]))
    return Platform("cuda", torch.cuda.get_device_capability())


@torch.compiler.assume_constant_result
def _platform_name(device_type: str) -> str:
    return platform_of(device_type).name


@dataclass(frozen=True)
class Kernel:
    """One way to compute attention, with its limits as data.

    Attributes:
        name: by which it is asked for.
        run: `(q, k, v, mask, scale, is_causal) -> (out, lse)` on [B, S, H, D]; the LSE in the backend's own shape, or
            None where the backend gives none.
        platforms: names of the platforms it runs on; empty for all.
        dtypes: empty for all.
        head_multiple: the head size is a multiple of this,
        head_limit: and at most this.
        capability: the smallest on CUDA,
        capability_below: and the first that is too large.
        architectures: how AMD's begin; empty for all.
        takes_mask: whether it can be given a mask.
        heads_first: whether the LSE is [B, H, S] and not [B, S, H].
        gives_lse: whether there is a LSE at all.
        contiguous_on: platforms where it is known to be wrong on strided inputs, or refuses them.
        source: the package that has to be importable, or None.
    """

    name: str
    run: Callable[..., tuple[Tensor, Tensor | None]]
    platforms: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = ()
    head_multiple: int = 1
    head_limit: int = 1 << 20
    capability: tuple[int, int] = (0, 0)
    capability_below: tuple[int, int] = (99, 0)
    architectures: tuple[str, ...] = ()
    takes_mask: bool = True
    heads_first: bool = True
    gives_lse: bool = True
    contiguous_on: tuple[str, ...] = ()
    source: str | None = None

    def why_not(
        self, platform: Platform, dtype: torch.dtype, head_size: int, mask: bool, lse: bool = True
    ) -> str | None:
        """The first reason why the kernel cannot be used, or None if it can."""
        if self.platforms and platform.name not in self.platforms:
            return f"runs on {' and '.join(self.platforms)}, not on {platform.name}"
        if platform.name == "cuda" and not self.capability <= platform.capability < self.capability_below:
            limits = (".".join(map(str, limit)) for limit in (self.capability, self.capability_below))
            return "is for compute capability {} and later, below {}".format(*limits)
        if platform.name == "rocm" and not platform.architecture.startswith(self.architectures or ""):
            return f"is for {' and '.join(f'{each}x' for each in self.architectures)}, not for {platform.architecture}"
        if self.name in platform.lacks:
            return f"is not in this torch for {platform.architecture}"
        if self.source is not None and (reason := _PACKAGES[self.source].why_not()) is not None:
            return f"{self.source} {reason}"
        if self.dtypes and dtype not in self.dtypes:
            return f"does not take {str(dtype).removeprefix('torch.')}"
        if head_size % self.head_multiple or head_size > self.head_limit:
            return f"takes heads of up to {self.head_limit} in multiples of {self.head_multiple}, not {head_size}"
        if mask and not self.takes_mask:
            return "takes no mask"
        if lse and not self.gives_lse:
            return "gives no log-sum-exp"
        return None

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, is_causal: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Attention over one set of keys.

        Args:
            q: [B, Sq, H, D]; k, v: [B, Sk, H, D]; any strides with contiguous heads.
            mask: boolean (True: attend) or additive, broadcastable to [B, H, Sq, Sk].
            scale: 1 / sqrt(D) if None.
            is_causal: query i attends to keys up to i.

        Returns:
            out [B, Sq, H, D] in `q`'s dtype, and lse [B, Sq, H] in float32 (float64 for float64), None if the backend
            gives none. Where every key of a row is masked out is 0 and lse -inf.
        """
        compiled = mask is not None and torch.compiler.is_compiling() and self.name in KERNELS
        if compiled and not needs_grad(q, k, v):
            return _masked_op(q, k, v, mask, scale, is_causal, self.name)
        if self.contiguous_on and _platform_name(q.device.type) in self.contiguous_on:
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        out, lse = self.run(q, k, v, mask, scale, is_causal)
        if lse is None:
            return out, None
        return normalise(out, lse, mask, self.heads_first)


def normalise(out: Tensor, lse: Tensor, mask: Tensor | None, heads_first: bool) -> tuple[Tensor, Tensor]:
    """Settle what a backend returned: the LSE [B, S, H] in float32, whatever its layout, padding and dtype.

    Some backends give the LSE a trailing axis of one, by version and by kernel: `lse.ndim < out.ndim` says that it is
    missing, and nothing else does. Rows without any key get out 0 and lse -inf; backends disagree on them too.

    Args:
        out: [B, S, H, D].
        lse: [B, H, S'] or [B, S', H], S' >= S, with or without a trailing axis of one.
        mask: as given to the kernel.
        heads_first: which of the two layouts it is.
    """
    if not lse.ndim < out.ndim:
        lse = lse.squeeze(-1)
    if heads_first:
        lse = lse.transpose(1, 2)
    lse = lse[:, : out.shape[1]].to(torch.promote_types(out.dtype, torch.float32))
    if mask is not None:
        blocked = ~mask if mask.dtype == torch.bool else mask == -math.inf
        dead = blocked.all(-1).transpose(1, 2)  # [B, S, H], or broadcastable to it
        lse = lse.masked_fill(dead, -math.inf)
        out = out.masked_fill(dead[..., None], 0)
    return out, lse


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros((), dtype=dtype, device=mask.device).masked_fill(~mask, -math.inf)


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _flash(q, k, v, mask, scale, is_causal):
    assert mask is None
    q, k, v = _heads_first(q, k, v)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)
    return out.transpose(1, 2), lse


def _cudnn(q, k, v, mask, scale, is_causal):
    bias = None if mask is None else _additive(mask, q.dtype).expand(-1, -1, q.shape[1], -1)
    q, k, v = _heads_first(q, k, v)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, bias, True, 0.0, is_causal, False, scale=scale
    )
    return out.transpose(1, 2), lse


def _efficient(q, k, v, mask, scale, is_causal):
    bias = None
    if mask is not None:
        # The kernel reads the bias in aligned rows: a row is padded to a multiple of 8, and cut again by a view.
        bias = torch.nn.functional.pad(_additive(mask, q.dtype), (0, -k.shape[1] % 8))[..., : k.shape[1]]
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], -1)
    q, k, v = _heads_first(q, k, v)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, is_causal, scale=scale
    )
    return out.transpose(1, 2), lse


def _flash_cpu(q, k, v, mask, scale, is_causal):
    bias = _additive(mask, q.dtype)
    if bias is not None:
        bias = bias.expand(q.shape[0], q.shape[2], q.shape[1], -1)
    q, k, v = _heads_first(q, k, v)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )
    return out.transpose(1, 2), lse


def _math(q, k, v, mask, scale, is_causal):
    """The definition, in float32 (float64 for float64); needs memory for all the scores."""
    dtype, accumulate = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(accumulate) for x in _heads_first(q, k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores + _additive(mask, accumulate)
    lse = scores.logsumexp(-1)
    weights = scores.masked_fill((lse == -math.inf)[..., None], 0).softmax(-1)
    return (weights @ v).transpose(1, 2).to(dtype), lse


class _Package:
    """`flash_attn_func` of an optional package, or of the Hub kernel that diffusers downloads in its place.

    Attributes:
        function: the function, once found.
        asked: the argument that asks it for the LSE.
    """

    def __init__(self, module: str, hub: str):
        self.module, self.hub = module, hub
        self.function: Callable | None = None
        self.asked: dict[str, bool] = {}

    @functools.cached_property
    def _imported(self) -> tuple[Callable | None, str]:
        """The package's own function, or None and why."""
        if importlib.util.find_spec(self.module) is None:
            return None, "is not installed"
        try:
            return importlib.import_module(self.module).flash_attn_func, ""
        except (ImportError, OSError, RuntimeError, AttributeError) as error:  # built for another torch, say
            return None, f"cannot be imported ({' '.join(str(error).split())})"

    def why_not(self) -> str | None:
        """Find the function; why there is none, or None."""
        if self.function is None:
            self.function, reason = self._imported
            if self.function is None and self.hub in {name.value for name in _HUB_KERNELS_REGISTRY}:
                # There after `set_attention_backend`.
                self.function = _HUB_KERNELS_REGISTRY[AttentionBackendName(self.hub)].kernel_fn
            if self.function is None:
                return reason
            names = inspect.signature(self.function).parameters
            # FlashAttention's name for it, and AITER's; the first releases of FlashAttention 3 returned it unasked.
            self.asked = {name: True for name in ("return_attn_probs", "return_lse") if name in names}
        return None


_PACKAGES = {
    "flash_attn": _Package("flash_attn", "flash_hub"),
    "flash_attn_3": _Package("flash_attn_interface", "_flash_3_hub"),
    "aiter": _Package("aiter", "aiter_fa2_hub"),
}


def _from_package(source: str, q, k, v, mask, scale, is_causal):
    assert mask is None
    package = _PACKAGES[source]
    out, lse, *_ = package.function(q, k, v, softmax_scale=scale, causal=is_causal, **package.asked)
    return out, lse


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("cudnn", _cudnn, ("cuda",), HALF, 8, 128, (8, 0)),
        # SDPA on ROCm 7.0 was wrong for a value that is a strided view (ROCm/pytorch#3230).
        Kernel("flash", _flash, ("cuda", "rocm"), HALF, 8, 256, (8, 0), takes_mask=False, contiguous_on=("rocm",)),
        Kernel("efficient", _efficient, ("cuda", "rocm"), (*HALF, torch.float32), 8, contiguous_on=("rocm",)),
        Kernel("flash_cpu", _flash_cpu, ("cpu",), (*HALF, torch.float32, torch.float64)),
        Kernel(
            "flash_attn_3",
            functools.partial(_from_package, "flash_attn_3"),
            ("cuda",),
            HALF,
            8,
            256,
            (9, 0),
            (10, 0),
            takes_mask=False,
            source="flash_attn_3",
        ),
        Kernel(
            "flash_attn",
            functools.partial(_from_package, "flash_attn"),
            ("cuda", "rocm"),
            HALF,
            8,
            256,
            (8, 0),
            takes_mask=False,
            source="flash_attn",
        ),
        Kernel(
            "aiter",
            functools.partial(_from_package, "aiter"),
            ("rocm",),
            (torch.bfloat16,),
            8,
            256,
            architectures=("gfx94", "gfx95"),
            takes_mask=False,
            contiguous_on=("rocm",),
            source="aiter",
        ),
        Kernel("math", _math),
    )
}


def _masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, is_causal: bool, name: str
) -> tuple[Tensor, Tensor]:
    """A kernel with a mask, as one operation for the compiler, which would write the mask out for every query."""
    out, lse = KERNELS[name](q, k, v, mask, scale, is_causal)
    return out.contiguous(), lse.contiguous()


_masked_op = torch.library.custom_op("diffusers_rocm::masked_attention", _masked, mutates_args=())


@_masked_op.register_fake
def _(q, k, v, *args):
    lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty((*q.shape[:3], v.shape[-1])), lse
