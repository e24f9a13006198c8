"""The classes that cannot be parallel, in one way or at all, and why: what the errors and docs/models.md say."""

_PART_OF_A_UNET = "part of a UNet, which is convolutions for the most part"
_OF_A_UNET = "a ControlNet of UNets, which are convolutions for the most part"
_A_LIST = "a list of ControlNets: enable each of its `nets`"
_SMALL = "a small model, of no gain from several ranks"

_NEITHER = {
    "Transformer2DModel": _PART_OF_A_UNET,
    "TransformerTemporalModel": _PART_OF_A_UNET,
    "DreamLiteTransformer2DModel": _PART_OF_A_UNET,
    "ControlNetModel": _OF_A_UNET,
    "ControlNetUnionModel": _OF_A_UNET,
    "ControlNetXSAdapter": _OF_A_UNET,
    "UNetControlNetXSModel": _OF_A_UNET,
    "SparseControlNetModel": _OF_A_UNET,
    "MultiControlNetModel": _A_LIST,
    "FluxMultiControlNetModel": _A_LIST,
    "HunyuanDiT2DMultiControlNetModel": _A_LIST,
    "QwenImageMultiControlNetModel": _A_LIST,
    "SD3MultiControlNetModel": _A_LIST,
    "PriorTransformer": _SMALL,
    "T5FilmDecoder": _SMALL,
    "MiniMaxMusic3RVQDepthDecoder": "an autoregressive decoder of seven tokens a frame, no diffusion transformer",
    "RFD4ProteinaTransformer": "a model of proteins: every token attends under a bias made from each pair of tokens",
    "AnyFlowFARTransformer3DModel": "attention in chunks under a block mask, by flex attention alone",
    "Kandinsky6SRTransformer3DModel": "sparse attention in blocks of tokens, by flex attention alone",
}

_SANA = (
    "its linear attention sums keys and values over all tokens, and its feed-forward convolves the whole image, both "
    "inside one module"
)

WITHOUT_TENSOR_PARALLEL_PLAN: dict[str, str] = {**_NEITHER}

# Also where diffusers has a plan that cannot be used.
WITHOUT_CONTEXT_PARALLEL_PLAN: dict[str, str] = {
    **_NEITHER,
    "WanAnimate2Transformer3DModel": "its attention rotates, and masks in blocks, whole frames of a video",
    "SanaTransformer2DModel": _SANA,
    "SanaControlNetModel": _SANA,
    "SanaVideoTransformer3DModel": _SANA,
    "SanaWMTransformer3DModel": "its linear attention carries a state from frame to frame, both ways over all tokens, "
    "and convolves frames, inside one module; so does its feed-forward",
}
