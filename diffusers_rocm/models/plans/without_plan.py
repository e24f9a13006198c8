"""The classes that cannot be parallel, in one way or at all, and why: what the errors and docs/models.md say."""

_NEITHER: dict[str, str] = {}

WITHOUT_TENSOR_PARALLEL_PLAN: dict[str, str] = {**_NEITHER}

# Also where diffusers has a plan that cannot be used.
WITHOUT_CONTEXT_PARALLEL_PLAN: dict[str, str] = {
    **_NEITHER,
    "WanAnimate2Transformer3DModel": "its attention rotates, and masks in blocks, whole frames of a video",
}
