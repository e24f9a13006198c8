"""Hunyuan-DiT, and its ControlNet."""

from .building_blocks import ATTENTION, ATTENTION_OUT, FEED_FORWARD, FEW_INPUTS, FEW_OUTPUTS
from .context_plan import ContextParallelPlan, gather, split
from .pixart_transformer_2d import CROSS_ATTENTION, TWO_LINEARS
from .plan import TensorParallelPlan, at


_COMMON = {
    **at("blocks.*.attn1", ATTENTION | ATTENTION_OUT),
    **at("blocks.*.attn2", CROSS_ATTENTION),
    **at("blocks.*.ff", FEED_FORWARD),
    "blocks.*.norm1.linear": "modulation",
    **at("text_embedder", TWO_LINEARS),
    **at("time_extra_emb.timestep_embedder", TWO_LINEARS),
    **at("time_extra_emb.extra_embedder", TWO_LINEARS),
    "time_extra_emb.pooler": "replicate:torch's own attention takes its weights; one row a step",
    "time_extra_emb.style_embedder?": "replicate:one row",
    "pos_embed": FEW_INPUTS,
}

TENSOR_PARALLEL_PLANS = {
    "HunyuanDiT2DModel": TensorParallelPlan(
        {
            **_COMMON,
            # Of the output of an earlier block beside that of the last, which every rank has whole.
            "blocks.*.skip_linear?": "gather",
            "norm_out.linear": "modulation",
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_extra_emb",
    ),
    "HunyuanDiT2DControlNetModel": TensorParallelPlan(
        {**_COMMON, "input_block": "gather", "controlnet_blocks.*": "gather"}, embedding="time_extra_emb"
    ),
}

# diffusers has none.
_SPLIT = {
    "blocks.0": {"hidden_states": split(1, 3)},
    "blocks.*": {"image_rotary_emb": split(0, 2)},
}
_WHOLE = ("blocks.*.attn2", "time_extra_emb.pooler")

CONTEXT_PARALLEL_PLANS = {
    "HunyuanDiT2DModel": ContextParallelPlan(
        {"": {"controlnet_block_samples": split(1, 3)}, **_SPLIT, "proj_out": gather()},
        streams=("hidden_states",),
        whole=_WHOLE,
    ),
    "HunyuanDiT2DControlNetModel": ContextParallelPlan(
        {**_SPLIT, "controlnet_blocks.*": gather()}, streams=("hidden_states",), whole=_WHOLE
    ),
}
