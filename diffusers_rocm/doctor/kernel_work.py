"""What the rank of the attention probe does: every kernel on this device, against the definition in float64.

Imported by its file, so by its absolute name the package is.
"""

from typing import Any

import torch

from diffusers_rocm.models.attention_kernels import KERNELS, Kernel, platform_of


HALF_OUT, HALF_LSE = 1e-2, 2e-2
# Relative L2 of the output, and the largest error of the log-sum-exp. A kernel that drops a mask, or counts its LSE in
# another base, is off by tenths.
LIMITS = {
    torch.bfloat16: (HALF_OUT, HALF_LSE),
    torch.float16: (HALF_OUT, HALF_LSE),
    torch.float32: (1e-4, 1e-3),
    torch.float64: (1e-10, 1e-10),
}
DTYPES = (torch.bfloat16, torch.float32)
BATCH, QUERIES, KEYS, HEADS, SIZE = 2, 130, 77, 3, 64


def try_kernels(rank, device: str, skip: list[str]) -> dict[str, Any]:
    """By kernel `{"why_not": reason}`, or by dtype and mask its `out` and `lse` errors and the LSE's own `shape`."""
    own = torch.device(device, 0) if device != "cpu" else torch.device("cpu")
    platform = platform_of(device)
    found: dict[str, Any] = {}
    for name, kernel in KERNELS.items():
        if name in skip:
            continue
        rank.stage(f"kernel {name}")
        reasons = {str(dtype): kernel.why_not(platform, dtype, SIZE, mask=False, lse=False) for dtype in DTYPES}
        usable = [dtype for dtype in DTYPES if reasons[str(dtype)] is None]
        found[name] = {"why_not": reasons[str(DTYPES[0])]}
        if usable:
            found[name] = {"tried": [row for dtype in usable for row in _try(kernel, own, dtype)]}
        rank.found(found)
    return found


def _try(kernel: Kernel, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(BATCH, length, HEADS, SIZE, generator=generator).to(dtype) for length in (QUERIES, KEYS, KEYS)
    )
    mask = torch.rand(BATCH, 1, QUERIES, KEYS, generator=generator) < 0.7
    rows = []
    for given in (None, mask) if kernel.takes_mask else (None,):
        on_device = [x.to(device) for x in (q, k, v)]
        there = None if given is None else given.to(device)
        row = {"dtype": str(dtype).removeprefix("torch."), "mask": given is not None}
        try:
            _, raw = kernel.run(*on_device, there, None, False)
            out, lse = kernel(*on_device, there, None)
        except (RuntimeError, TypeError, ValueError) as error:
            rows.append(row | {"error": " ".join(str(error).split())[:200]})
            continue
        wanted, wanted_lse = KERNELS["math"](*(x.double() for x in (q, k, v)), given, None)
        limits = LIMITS[dtype]
        errors = {"out": ((out.cpu().double() - wanted).norm() / wanted.norm()).item(), "out_limit": limits[0]}
        if lse is not None:
            shape_fits = lse.shape == wanted_lse.shape
            difference = (lse.cpu().double() - wanted_lse).abs().max().item() if shape_fits else float("inf")
            errors |= {"lse": difference, "lse_limit": limits[1], "shape": list(raw.shape)}
        rows.append(row | errors)
    return rows
