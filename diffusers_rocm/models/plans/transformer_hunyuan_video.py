"""HunyuanVideo."""

from .context_plan import ContextParallelPlan, LeadingTokens, gather, split


# diffusers has none. The text is refined whole; the mask is made for the joined sequence, so it stays whole too.
CONTEXT_PARALLEL_PLANS = {
    "HunyuanVideoTransformer3DModel": ContextParallelPlan(
        {
            "rope": {0: split(0, 2, output=True), 1: split(0, 2, output=True)},
            "transformer_blocks.0": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)},
            # Image to video by token replacement modulates the first frame by itself.
            "transformer_blocks.*": {"num_tokens?": LeadingTokens()},
            "single_transformer_blocks.*": {"num_tokens?": LeadingTokens()},
            "proj_out": gather(),
        },
        streams=("hidden_states", "encoder_hidden_states"),
        whole=("context_embedder.token_refiner.refiner_blocks.*.attn",),
    )
}
