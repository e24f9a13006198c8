"""The choice between attention kernels, and diffusers' dispatch with ours in it."""

import functools
import inspect
import itertools
from collections.abc import Callable

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from diffusers.utils import logging
from torch import Tensor

from .attention_kernels import KERNELS, Kernel, Platform, platform_of


logger = logging.get_logger(__name__)

# diffusers' backends that are one of ours; "native" is a free choice, and every other backend stays itself.
KERNEL_OF_BACKEND = {
    "_native_flash": "flash",
    "_native_cudnn": "cudnn",
    "_native_efficient": "efficient",
    "_native_math": "math",
    "flash": "flash_attn",
    "flash_hub": "flash_attn",
    "_flash_3": "flash_attn_3",
    "_flash_3_hub": "flash_attn_3",
    "aiter": "aiter",
    "aiter_fa2_hub": "aiter",
}


def preference(platform: Platform) -> tuple[str, ...]:
    """Kernels that come with torch, from the fastest to the one that always works.

    On Hopper cuDNN is the fastest (docs/performance.md), and torch's own choice there and on the first Blackwells.
    Nothing was measured elsewhere: FlashAttention 2 takes larger heads, and is what torch takes.
    """
    first = ("cudnn", "flash") if platform.name == "cuda" and platform.capability[0] in (9, 10) else ("flash", "cudnn")
    return (*first, "efficient", "flash_cpu", "math")


def explain(platform: Platform, dtype: torch.dtype, head_size: int, mask: bool) -> list[tuple[str, str | None]]:
    """Kernels in order of preference, each with the reason why it cannot be used, or None: the first None is taken.

    Those of packages come last, after one that always works: they are taken where they are asked for by name, as in
    diffusers.
    """
    packages = (name for name, kernel in KERNELS.items() if kernel.source is not None)
    names = (*preference(platform), *packages)
    return [(name, KERNELS[name].why_not(platform, dtype, head_size, mask)) for name in names]


@functools.cache
def _tell_choice(kernel: str, dtype: torch.dtype, head_size: int, mask: bool, rejected: str) -> None:
    """Once for each kind of attention."""
    what = f"{str(dtype).removeprefix('torch.')} heads of {head_size}{', masked' if mask else ''}"
    logger.info(f"attention kernel {kernel} for {what}" + (f"; {rejected}" if rejected else ""))


@torch.compiler.assume_constant_result  # nothing of it to trace, and nothing to guard
def _choose(
    device_type: str, dtype: torch.dtype, head_size: int, mask: bool, asked: str | None
) -> tuple[str, str | None]:
    """`(kernel, None)`, or `(what was asked for, why not)`."""
    platform = platform_of(device_type)
    reasons = explain(platform, dtype, head_size, mask)
    usable = [name for name, reason in reasons if reason is None]
    if asked is None:
        before = itertools.takewhile(lambda each: each[1] is not None, reasons)
        _tell_choice(usable[0], dtype, head_size, mask, "; ".join(f"{name} {reason}" for name, reason in before))
        return usable[0], None
    if asked == "flash" and platform.name == "cpu":
        asked = "flash_cpu"
    reason = KERNELS[asked].why_not(platform, dtype, head_size, mask)
    return asked, reason and f"attention kernel {asked!r} {reason}; usable here: {', '.join(usable)}"


def choose_kernel(q: Tensor, mask: Tensor | None, asked: str | None = None) -> Kernel:
    """The fastest kernel that can take `q` [B, S, H, D] with this mask, or the one that is asked for.

    Raises:
        ValueError: the kernel that is asked for cannot be used here.
    """
    name, problem = _choose(q.device.type, q.dtype, q.shape[-1], mask is not None, asked)
    if problem is not None:
        raise ValueError(problem)
    return KERNELS[name]


def check_ring_backend(path: str, backend: str | None) -> None:
    """Raises ValueError where the backend of the attention module at `path` gives no log-sum-exp to merge by."""
    backend = backend or _AttentionBackendRegistry.get_active_backend()[0]
    if backend not in {each.value for each in AttentionBackendName}:
        return  # diffusers says which there are
    name = AttentionBackendName(backend).value
    if name != "native" and name not in KERNEL_OF_BACKEND:
        raise ValueError(
            f"{path} uses attention backend {name!r}, which gives no log-sum-exp, and a ring merges its parts by it; "
            f'use rotate_method="allgather", ulysses_degree, or set_attention_backend() with native, '
            f"{', '.join(KERNEL_OF_BACKEND)}"
        )


# What diffusers' dispatch gives to a backend.
_DISPATCHED = (
    "query",
    "key",
    "value",
    "attn_mask",
    "dropout_p",
    "is_causal",
    "scale",
    "enable_gqa",
    "return_lse",
    "_parallel_config",
)


def wrap_backend(backend: AttentionBackendName, original: Callable) -> Callable:
    """A backend of diffusers' dispatch that serves our split sequences too, and everything else as before."""
    names = set(inspect.signature(original).parameters)

    def on_whole_sequences(q, k, v, mask, scale, is_causal):
        if mask is not None and "attn_mask" not in names:
            raise ValueError(f"attention backend {backend.value!r} takes no mask")
        arguments = {"attn_mask": mask, "scale": scale, "is_causal": is_causal}
        return original(q, k, v, **{key: value for key, value in arguments.items() if key in names}), None

    kernel: Kernel | str | None = KERNEL_OF_BACKEND.get(backend.value)
    if kernel is None and backend.value != "native":
        kernel = Kernel(backend.value, on_whole_sequences, gives_lse=False)

    @functools.wraps(original)
    def dispatched(query, key, value, _parallel_config=None, **kwargs):
        attend = getattr(_parallel_config, "attend", None)
        if attend is None:
            if "_parallel_config" in names:
                kwargs["_parallel_config"] = _parallel_config
            return original(query, key, value, **{name: given for name, given in kwargs.items() if name in names})
        if kwargs.get("dropout_p"):
            raise ValueError("attention over several ranks has no dropout")
        return attend(
            query,
            key,
            value,
            kwargs.get("attn_mask"),
            kwargs.get("scale"),
            kwargs.get("is_causal", False),
            kernel,
        )

    return dispatched


def wrap_argument_names(names: set[str]) -> set[str]:
    """What the dispatch may pass to a wrapped backend: all that it has."""
    return names | set(_DISPATCHED)


def wrap_forward_op(original: Callable) -> Callable:
    """diffusers' forward of a backend for its own context parallelism, with the LSE as its ring broadcasts it.

    The ring merges outputs [B, S, H, D] by an LSE [B, S, H, 1]. diffusers before 0.38 (and its ring_anything before
    0.40) took a torch of 2.9 or later for the sign that the backend gave the trailing axis; the backend decides.
    """

    @functools.wraps(original)
    def forward_op(*args, **kwargs):
        result = original(*args, **kwargs)
        if isinstance(result, tuple):
            out, lse, *rest = result
            if lse is not None and lse.ndim < out.ndim:
                lse = lse.unsqueeze(-1)
            return (out, lse, *rest)
        return result

    return forward_op
