"""Split models in use: training with gradient checkpointing, copies, offloading, meshes and configs of all kinds."""

import copy
import unittest
from unittest import mock

import diffusers
import torch
import torch.distributed as dist
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import ContextParallelConfig, TensorParallelConfig

from ..testing_utils import relative_l2, run_ranks
from .testing_utils.context_parallelism import enable
from .testing_utils.parallelism import FLOAT32_BAR
from .transformers.test_models_transformer_flux import FluxTransformerTesterConfig


RING = (2, 1, "p2p")
CONFIG = FluxTransformerTesterConfig()


def inputs_of(length: int) -> dict:
    """Inputs of `length` tokens of the picture."""
    inputs = CONFIG.get_dummy_inputs(1)
    return {**inputs, "hidden_states": inputs["hidden_states"][:, :length], "img_ids": inputs["img_ids"][:length]}


def checkpointing_worker(lengths: tuple[int, ...], first: str) -> dict[str, float]:
    """Errors of the gradients of one backward after a forward for each length, against those without any of this."""

    def gradients() -> dict[str, torch.Tensor]:
        batches = [inputs_of(length) for length in lengths]
        for batch in batches:
            batch["hidden_states"].requires_grad_()
        sum(CONFIG.get_output(model, batch).square().mean() for batch in batches).backward()
        grads = {
            f"input {length}": batch["hidden_states"].grad for length, batch in zip(lengths, batches, strict=True)
        }
        grads |= {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return grads

    model = CONFIG.get_model()
    reference = gradients()
    steps = [lambda: enable(model, RING), model.enable_gradient_checkpointing]
    for step in steps if first == "split" else reversed(steps):
        step()
    checkpoint = model._gradient_checkpointing_func
    ours = gradients()
    for name, grad in ours.items():
        if not name.startswith("input"):
            dist.all_reduce(grad)
    model.disable_parallelism()
    assert model._gradient_checkpointing_func is checkpoint
    again = gradients()
    scale = max(grad.norm() for name, grad in reference.items() if not name.startswith("input"))
    errors = {f"{name} restored": relative_l2(again[name], grad) for name, grad in reference.items() if grad.norm()}
    for name, grad in reference.items():
        errors[name] = ((ours[name] - grad).norm() / max(grad.norm(), 1e-3 * scale)).item()
    return errors


@torch.no_grad()
def copy_worker(kind: str) -> dict[str, float]:
    """Errors of a copy of a parallel model, of the model after it, and of both once they are whole again."""
    model, inputs = CONFIG.get_model(), CONFIG.get_dummy_inputs(1)
    want, errors = CONFIG.get_output(model, inputs), {}
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ring" if kind == "context" else "tp",))
    model.enable_parallelism(
        config={"context": ContextParallelConfig, "tensor": TensorParallelConfig}[kind](mesh=mesh)
    )
    copied = copy.deepcopy(model)
    for name, each in (("copy", copied), ("model", model)):
        errors[name] = relative_l2(CONFIG.get_output(each, inputs), want)
    model.disable_parallelism()
    errors["copy of a whole model"] = relative_l2(CONFIG.get_output(copied, inputs), want)
    copied.disable_parallelism()
    for name, each in (("whole copy", copied), ("whole model", model)):
        errors[name] = relative_l2(CONFIG.get_output(each, inputs), want)
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in copied.modules()) == 0
    return errors


@torch.no_grad()
def resolutions_worker() -> list[float]:
    model, other = CONFIG.get_model(), CONFIG.get_model()
    enable(model, RING)
    sizes = (35, 20, 35, 33)
    return [relative_l2(CONFIG.get_output(model, inputs_of(n)), CONFIG.get_output(other, inputs_of(n))) for n in sizes]


@torch.no_grad()
def group_offload_worker(kind: str, first: str) -> float:
    model, inputs = CONFIG.get_model(), CONFIG.get_dummy_inputs(1)
    want = CONFIG.get_output(model, inputs)

    def offload() -> None:
        device = torch.device("cpu")
        model.enable_group_offload(device, device, kind, num_blocks_per_group=1 if kind == "block_level" else None)

    steps = [lambda: enable(model, RING), offload]
    # diffusers 0.37 asks for an accelerator even where it has no use for one.
    with mock.patch.object(torch.accelerator, "current_accelerator", return_value=torch.device("cpu")):
        for step in steps if first == "split" else reversed(steps):
            step()
    CONFIG.get_output(model, inputs)
    return relative_l2(CONFIG.get_output(model, inputs), want)


@torch.no_grad()
def config_worker(kind: str) -> tuple[float, tuple[int, int]]:
    """Error, and the degrees of the ring and Ulysses that came to the model."""
    model, inputs = CONFIG.get_model(), CONFIG.get_dummy_inputs(1)
    want = CONFIG.get_output(model, inputs)
    if kind == "inside diffusers'":
        config = diffusers.ParallelConfig(context_parallel_config=ContextParallelConfig(2, 2))
    elif kind == "mesh":
        config = ContextParallelConfig(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "ulysses")))
    else:
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp", "ring", "ulysses"))
        config = ContextParallelConfig(mesh=mesh)
    for _ in range(2):
        model.enable_parallelism(config=config)
        error = relative_l2(CONFIG.get_output(model, inputs), want)
        split = model.transformer_blocks[0].attn.processor._parallel_config
        model.disable_parallelism()
    return error, (split.ring.size, split.ulysses.size)


@torch.no_grad()
def different_weights_worker() -> tuple[float, bool]:
    """Error against the first rank's model, and whether its weights are what the ranks have."""
    reference, inputs = CONFIG.get_model(seed=0), CONFIG.get_dummy_inputs(1)
    model = CONFIG.get_model(seed=dist.get_rank())
    enable(model, RING)
    error = relative_l2(CONFIG.get_output(model, inputs), CONFIG.get_output(reference, inputs))
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return error, all(torch.equal(x, y) for x, y in pairs)


class TestSplitModelsInUse(unittest.TestCase):
    @parameterized.expand([((35,), "split"), ((35, 20), "split"), ((20, 35), "checkpointing")])
    def test_gradient_checkpointing(self, lengths, first):
        for errors in run_ranks(2, checkpointing_worker, lengths, first):
            wrong = {name: error for name, error in errors.items() if not error <= FLOAT32_BAR}
            assert not wrong, wrong

    @parameterized.expand([("context",), ("tensor",)])
    def test_copies(self, kind):
        for errors in run_ranks(2, copy_worker, kind):
            assert max(errors.values()) <= FLOAT32_BAR, errors

    def test_resolutions_in_turn(self):
        for errors in run_ranks(2, resolutions_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    @parameterized.expand([(kind, first) for kind in ("block_level", "leaf_level") for first in ("split", "offload")])
    def test_group_offload(self, kind, first):
        for error in run_ranks(2, group_offload_worker, kind, first):
            assert error <= FLOAT32_BAR, error

    @parameterized.expand([("inside diffusers'", (2, 2)), ("mesh", (2, 2)), ("mesh of three axes", (1, 2))])
    def test_config(self, kind, degrees):
        for error, got in run_ranks(4, config_worker, kind):
            assert error <= FLOAT32_BAR and got == degrees, (error, got)

    def test_ranks_that_start_from_different_weights(self):
        for error, same in run_ranks(2, different_weights_worker):
            assert error <= FLOAT32_BAR and same, (error, same)
