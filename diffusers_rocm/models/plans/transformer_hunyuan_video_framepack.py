"""FramePack: HunyuanVideo with packed history frames before the latents."""

from .building_blocks import FEW_INPUTS
from .context_plan import ContextParallelPlan, gather, split
from .plan import TensorParallelPlan
from .transformer_hunyuan_video import HUNYUAN_VIDEO


TENSOR_PARALLEL_PLANS = {
    "HunyuanVideoFramepackTransformer3DModel": TensorParallelPlan(
        {
            **HUNYUAN_VIDEO,
            "image_projection.up?": "column:mlp",
            "image_projection.down?": "row:mlp",
            "clean_x_embedder?": FEW_INPUTS,
        }
    )
}

# diffusers has none. The model cuts the history off the end of the blocks, so they are gathered there.
CONTEXT_PARALLEL_PLANS = {
    "HunyuanVideoFramepackTransformer3DModel": ContextParallelPlan(
        {
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            "transformer_blocks.*": {"freqs_cis": split(0, 2)},
            "single_transformer_blocks.*": {"image_rotary_emb": split(0, 2)},
            "single_transformer_blocks.-1": [gather(), None],
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    )
}
