"""What a model's tests need to know of it; the mixins assert."""

from collections.abc import Mapping

import torch
from torch import nn


class BaseModelTesterConfig:
    """One model class with one tiny config. No assertions here."""

    model_class: type[nn.Module]
    # What the class's own defaults lack to be a model of real size.
    real_init_dict: Mapping = {}
    # Why no sequence can have an odd length.
    even_lengths: str | None = None
    # Classes whose forward is compiled by `compile_repeated_blocks`, of which the mixin expects one graph each.
    repeated_block_count: int
    # Sharded parameters (patterns of their names) that cannot change the output, and why: a bias of keys, say.
    without_effect: Mapping[str, str] = {}
    # What a reader of the errors has to know of how they were come by.
    note: str | None = None
    # Inputs that are activations: of the model's dtype, and what gradients are asked of.
    floating_inputs = ("hidden_states", "encoder_hidden_states", "pooled_projections", "controlnet_cond")
    device = "cpu"

    def get_init_dict(self) -> dict:
        raise NotImplementedError

    def get_dummy_inputs(self, batch_size: int = 1) -> dict:
        raise NotImplementedError

    def get_model(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model with random weights everywhere: biases, norm weights and layers that start from zero included."""
        torch.manual_seed(seed)
        model = self.model_class(**self.get_init_dict()).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 1.2 / parameter[0].numel() ** 0.5)
                elif "norm" in name and name.endswith("weight"):
                    parameter.normal_(1, 0.2)
                else:
                    parameter.normal_(0, 0.3)
        return model.to(self.device) if dtype == torch.float32 else model.to(self.device, dtype)

    def get_inputs(self, batch_size: int = 1) -> dict:
        inputs = self.get_dummy_inputs(batch_size)
        return {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in inputs.items()}

    def cast(self, inputs: dict, dtype: torch.dtype) -> dict:
        """The activations, and lists of them, in another dtype."""

        def each(name, value):
            if isinstance(value, list):  # of activations (Z-Image), or of shapes and lengths (Qwen-Image)
                return [x.to(dtype) if isinstance(x, torch.Tensor) else x for x in value]
            return value.to(dtype) if name in self.floating_inputs else value

        return {name: each(name, value) for name, value in inputs.items()}

    def get_output(self, model: nn.Module, inputs: dict) -> torch.Tensor:
        """The model's answer as one tensor, whatever its structure."""
        return flatten_output(model(**inputs, return_dict=False))


def flatten_output(output) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.flatten()
    return torch.cat([flatten_output(item) for item in output if item is not None])


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
