"""The classes that cannot be parallel, in one way or at all, and why: what the errors and docs/models.md say."""

_NEITHER: dict[str, str] = {}

_SANA = (
    "its linear attention sums keys and values over all tokens, and its feed-forward convolves the whole image, both "
    "inside one module"
)

WITHOUT_TENSOR_PARALLEL_PLAN: dict[str, str] = {**_NEITHER}

# Also where diffusers has a plan that cannot be used.
WITHOUT_CONTEXT_PARALLEL_PLAN: dict[str, str] = {
    **_NEITHER,
    "SanaTransformer2DModel": _SANA,
    "SanaControlNetModel": _SANA,
    "SanaVideoTransformer3DModel": _SANA,
}
