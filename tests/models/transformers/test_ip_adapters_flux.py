"""FLUX.1 with image prompts: adapters beside sharded attention, and in a split sequence."""

import unittest
from unittest import mock

import pytest
import torch
from diffusers import FluxTransformer2DModel
from parameterized import parameterized

from diffusers_rocm import TensorParallelConfig
from diffusers_rocm.hooks import tensor_parallel_layers

from ...testing_utils import relative_l2, run_ranks
from ..testing_utils.common import randn
from ..testing_utils.context_parallelism import enable
from ..testing_utils.parallelism import FLOAT32_BAR, _clone_state, _same_state
from ..testing_utils.workers import weighted_backward
from .test_models_transformer_flux import FluxTransformerTesterConfig


def ip_adapter_state_dict(model: FluxTransformer2DModel, seed: int) -> dict:
    width, text = model.inner_dim, model.config.joint_attention_dim
    adapter = {}
    for index in range(model.config.num_layers):
        for part in ("to_k_ip", "to_v_ip"):
            seed += 1
            adapter[f"{index}.{part}.weight"] = randn(width, text, seed=seed) * 0.3
            adapter[f"{index}.{part}.bias"] = randn(width, seed=seed + 100) * 0.3
    projection = {
        "proj.weight": randn(4 * text, 10, seed=seed + 200) * 0.3,
        "proj.bias": randn(4 * text, seed=seed + 300) * 0.3,
        "norm.weight": 1 + 0.1 * randn(text, seed=seed + 400),
        "norm.bias": randn(text, seed=seed + 500) * 0.1,
    }
    return {"ip_adapter": adapter, "image_proj": projection}


@torch.no_grad()
def ip_adapter_worker(tp: int, when: str) -> tuple[float, float, bool]:
    """Error with two IP-Adapters, what they change at all, and whether disabling restores the model."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(2)
    plain = config.get_output(model, inputs)
    adapters = [ip_adapter_state_dict(model, seed) for seed in (10, 20)]
    images = [randn(2, 1, 10, seed=30), randn(2, 1, 10, seed=31)]

    def output() -> torch.Tensor:
        return config.get_output(
            model, {**inputs, "joint_attention_kwargs": {"ip_adapter_image_embeds": list(images)}}
        )

    def load(model: FluxTransformer2DModel) -> None:
        model._load_ip_adapter_weights(adapters)
        for index, block in enumerate(model.transformer_blocks):
            block.attn.processor.scale = [0.7 + index, -0.4]

    other = config.get_model()
    load(other)
    if when == "before":
        load(model)
    reference = config.get_output(
        other, {**inputs, "joint_attention_kwargs": {"ip_adapter_image_embeds": list(images)}}
    )
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    if when == "after":
        load(model)
    error = relative_l2(output(), reference)
    model.disable_parallelism()
    restored = _same_state(model, _clone_state(other)) and torch.equal(output(), reference)
    return error, relative_l2(plain, reference), restored


@torch.no_grad()
def ip_adapter_backend_worker(tp: int) -> list[str]:
    """The attention backends that a forward with an image prompt asks the dispatch for, from our processor."""
    config, asked = FluxTransformerTesterConfig(), []
    model = config.get_model()
    model._load_ip_adapter_weights([ip_adapter_state_dict(model, 10)])
    model.set_attention_backend("_native_math")
    model.enable_parallelism(config=TensorParallelConfig(tp=tp))
    original = tensor_parallel_layers.dispatch_attention_fn

    def dispatch(*args, backend=None, **kwargs):
        asked.append(str(backend and getattr(backend, "value", backend)))
        return original(*args, backend=backend, **kwargs)

    embeds = {"ip_adapter_image_embeds": [randn(1, 1, 10, seed=30)]}
    with mock.patch.object(tensor_parallel_layers, "dispatch_attention_fn", dispatch):
        config.get_output(model, {**config.get_dummy_inputs(1), "joint_attention_kwargs": embeds})
    return asked


def context_ip_adapter_worker(split: tuple) -> tuple[dict[str, float], float, str]:
    """Errors with two IP-Adapters, what they change at all, and what is said of one that comes after the split."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(2)
    images = [randn(2, 1, 10, seed=30).requires_grad_(), randn(2, 1, 10, seed=31).requires_grad_()]
    leaves = dict(zip(("first", "second"), images, strict=True))

    def output() -> torch.Tensor:
        return config.get_output(
            model, {**inputs, "joint_attention_kwargs": {"ip_adapter_image_embeds": list(images)}}
        )

    def backward() -> dict[str, torch.Tensor]:
        kwargs = {"joint_attention_kwargs": {"ip_adapter_image_embeds": list(images)}}
        return weighted_backward(config, model, {**inputs, **kwargs}, leaves)

    plain = config.get_output(model, inputs)
    enable(model, split)
    model._load_ip_adapter_weights([ip_adapter_state_dict(model, seed) for seed in (10, 20)])
    with pytest.raises(ValueError) as caught, torch.no_grad():
        output()
    model.disable_parallelism()
    reference, gradients = output(), backward()
    enable(model, split)
    errors = {f"gradient of the {name}": relative_l2(x, gradients[name]) for name, x in backward().items()}
    errors["output"] = relative_l2(output(), reference)
    return errors, relative_l2(plain, reference), str(caught.value)


class TestFluxIPAdapters(unittest.TestCase):
    @parameterized.expand([("before", 2), ("before", 3), ("after", 2)])
    def test_tensor_parallel(self, when, tp):
        for error, effect, restored in run_ranks(tp, ip_adapter_worker, tp, when):
            assert effect > 1e-2, f"the adapter changes nothing: {effect}"
            assert error <= FLOAT32_BAR, error
            assert restored

    def test_keeps_the_attention_backend(self):
        for asked in run_ranks(2, ip_adapter_backend_worker, 2):
            assert asked == ["_native_math"] * 2, asked

    @parameterized.expand([((3, 1, "p2p"),), ((1, 2, "p2p"),)])
    def test_context_parallel(self, split):
        for errors, change, message in run_ranks(split[0] * split[1], context_ip_adapter_worker, split):
            assert max(errors.values()) <= FLOAT32_BAR and change > 0.01, (errors, change)
            assert "transformer_blocks.0.attn (FluxIPAdapterAttnProcessor) was set after" in message, message


if __name__ == "__main__":
    unittest.main()
