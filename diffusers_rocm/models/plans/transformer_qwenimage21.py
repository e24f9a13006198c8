"""Qwen-Image 2.1."""

import math
from typing import Any

from torch import Tensor

from .building_blocks import ATTENTION, ATTENTION_OUT, FEW_INPUTS, FEW_OUTPUTS, ONE_ROW
from .context_plan import AfterWhole, ContextParallelPlan, LengthOf, Refused, gather
from .plan import TensorParallelPlan, at


TENSOR_PARALLEL_PLANS = {
    "QwenImage21Transformer2DModel": TensorParallelPlan(
        {
            **at("transformer_blocks.*.attn", ATTENTION | ATTENTION_OUT),
            "transformer_blocks.*.img_mlp.proj": "column:mlp",
            "transformer_blocks.*.img_mlp.gate_layer": "column:mlp",
            "transformer_blocks.*.img_mlp.out": "row:mlp",
            "txt_in.in_layer": "column:mlp",
            "txt_in.out_layer": "row:mlp",
            # One for all blocks.
            "modulation.1": "modulation",
            "norm_out.linear": "modulation",
            "img_in": FEW_INPUTS,
            "time_text_embed": ONE_ROW,
            "proj_out": FEW_OUTPUTS,
        },
        embedding="time_text_embed",
    )
}


def _picture(shapes: Any) -> int:
    """Tokens of the picture that is made, the last one."""
    return math.prod(shapes[0][-1])


# diffusers has none. All but the picture (text and reference pictures, whose attention is causal, run by run) stays
# whole: it does not attend to the picture, and from the second step on a cache has its keys.
CONTEXT_PARALLEL_PLANS = {
    "QwenImage21Transformer2DModel": ContextParallelPlan(
        {
            "": {"img_shapes": LengthOf("hidden_states", _picture)},
            "transformer_blocks.0": {"hidden_states": AfterWhole(1)},
            "transformer_blocks.*": {
                "rotary_emb": AfterWhole(0),
                "target_token_mask": AfterWhole(0),
                "attention_mask": Refused("flex attention masks it whole", lambda mask: not isinstance(mask, Tensor)),
            },
            "norm_out": {"target_token_mask": AfterWhole(0)},
            "proj_out": gather(after_whole=True),
        },
        streams=("hidden_states",),
        after_whole=True,
    )
}
