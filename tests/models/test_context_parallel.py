"""What context parallelism says of configs, plans and models that it cannot serve; models that go their own way."""

import dataclasses
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.hooks import AlignDevicesHook, add_hook_to_module, remove_hook_from_module
from diffusers import ContextParallelConfig as DiffusersConfig
from diffusers import (
    FluxTransformer2DModel,
    PyramidAttentionBroadcastConfig,
    SanaTransformer2DModel,
)
from diffusers.models._modeling_parallel import ContextParallelOutput
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _AttentionBackendRegistry,
    dispatch_attention_fn,
)
from diffusers.models.attention_processor import JointAttnProcessor2_0
from parameterized import parameterized
from torch.distributed.device_mesh import init_device_mesh

from diffusers_rocm import ContextParallelConfig
from diffusers_rocm.hooks.sequence_split import SequenceSplit
from diffusers_rocm.models.attention_dispatch import wrap_backend
from diffusers_rocm.models.plans import CONTEXT_PARALLEL_PLANS
from diffusers_rocm.models.plans.context_plan import ContextParallelPlan, gather, split

from ..testing_utils import TwoHosts, message_of, relative_l2, run_ranks, slow
from .testing_utils.common import randn
from .testing_utils.context_parallelism import enable
from .testing_utils.parallelism import FLOAT32_BAR
from .transformers.test_models_transformer_flux import FLUX_INIT, FluxTransformerTesterConfig
from .transformers.test_models_transformer_sd3 import SD3TransformerTesterConfig


class TestContextParallelConfig(unittest.TestCase):
    def test_it_is_diffusers_own_with_all_its_arguments(self):
        config = ContextParallelConfig(
            ring_degree=2, convert_to_fp32=False, rotate_method="allgather", ulysses_anything=True
        )
        assert isinstance(config, DiffusersConfig) and (config.ring_degree, config.ulysses_degree) == (2, 1)
        assert ContextParallelConfig(2).rotate_method == "p2p"
        assert "ring_degree=1, ulysses_degree=3" in repr(ContextParallelConfig(ulysses_degree=3))

    @parameterized.expand(
        [
            ({}, "over 1 rank does nothing"),
            ({"ring_degree": 1, "ulysses_degree": 1}, "over 1 rank does nothing"),
            ({"ring_degree": 0}, "ring_degree must be a whole number of ranks, at least 1; got 0"),
            ({"ulysses_degree": 2.0}, "ulysses_degree must be a whole number"),
            ({"ring_degree": True}, "ring_degree must be a whole number"),
            ({"ring_degree": 2, "rotate_method": "alltoall"}, "rotate_method must be 'p2p' or 'allgather'"),
            ({"ring_degree": 2, "mesh": 4}, "mesh must be a DeviceMesh; got a int"),
        ]
    )
    def test_message(self, arguments, message):
        with pytest.raises(ValueError) as caught:
            ContextParallelConfig(**arguments)
        assert message in str(caught.value)

    def test_no_process_group(self):
        with pytest.raises(ValueError, match="ring=2 \\* ulysses=3 needs a process group.*nproc_per_node=6"):
            ContextParallelConfig(2, 3).axes()


def flux(**changes) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**{**FLUX_INIT, **changes}).eval()


def dispatch_with_dropout(split) -> None:
    x = torch.zeros(1, 4, 2, 8)
    dispatch_attention_fn(x, x, x, dropout_p=0.1, parallel_config=split)


@torch.no_grad()
def errors_worker() -> dict[str, str]:
    config, messages = FluxTransformerTesterConfig(), {}
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    want = config.get_output(model, inputs)

    def refuse(name: str, parallel, **kwargs) -> None:
        messages[name] = message_of(model.enable_parallelism, config=parallel, **kwargs)
        assert getattr(model, "parallelism", None) is None
        assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == 0

    refuse("too few", ContextParallelConfig(ring_degree=2))
    refuse("too many", ContextParallelConfig(ring_degree=4))
    refuse("missing module", ContextParallelConfig(3), cp_plan={"": {"hidden_states": split(1, 3)}, "out": gather()})
    rules = {"": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)}}
    for rest in ({"whole": ("blocks.*.attn",)}, {"alone": {"blocks.*.attn": "hidden_states"}}):
        refuse(f"missing {next(iter(rest))}", ContextParallelConfig(3), cp_plan=ContextParallelPlan(rules, **rest))
    refuse(
        "missing argument",
        ContextParallelConfig(3),
        cp_plan={"": {"hidden_states": split(1, 3), "image": split(1, 3)}},
    )
    idle = ContextParallelPlan(rules, idle={"transformer_blocks.*": "perturbed"})
    refuse("missing idle", ContextParallelConfig(3), cp_plan=idle)
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("ring",))
    messages["mesh"] = message_of(ContextParallelConfig, ring_degree=2, mesh=mesh)
    unnamed = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    messages["other mesh"] = message_of(ContextParallelConfig, ring_degree=3, mesh=unnamed)
    reversed_axes = init_device_mesh("cpu", (1, 3), mesh_dim_names=("ulysses", "ring"))
    messages["order of axes"] = message_of(ContextParallelConfig, mesh=reversed_axes)
    for block in model.transformer_blocks:
        block.attn.processor._attention_backend = "flex"
    refuse("backend", ContextParallelConfig(3))
    for block in model.transformer_blocks:
        block.attn.processor._attention_backend = None

    model.enable_parallelism(config=ContextParallelConfig(mesh=mesh))
    attend = model.transformer_blocks[0].attn.processor._parallel_config
    messages["dropout"] = message_of(dispatch_with_dropout, attend)
    messages["twice"] = message_of(model.enable_parallelism, config=ContextParallelConfig(3))
    messages["one token"] = message_of(model, **{**inputs, "encoder_hidden_states": randn(1, 1, 32, seed=2)})
    messages["short"] = message_of(model, **{**inputs, "encoder_hidden_states": randn(1, 2, 32, seed=2)})
    messages["dims"] = message_of(model, **{**inputs, "txt_ids": inputs["txt_ids"][None]})
    messages["after errors"] = str(relative_l2(config.get_output(model, inputs), want) <= FLOAT32_BAR)

    model.disable_parallelism()
    whole = CONTEXT_PARALLEL_PLANS["FluxTransformer2DModel"]
    rules = {path: how for path, how in whole.modules.items() if not isinstance(how, ContextParallelOutput)}
    model.enable_parallelism(
        config=ContextParallelConfig(mesh=mesh), cp_plan=dataclasses.replace(whole, modules=rules)
    )
    messages["no gather"] = message_of(model, **inputs)

    sana = object.__new__(SanaTransformer2DModel)
    torch.nn.Module.__init__(sana)
    messages["no plan"] = message_of(SanaTransformer2DModel.enable_parallelism, sana, config=ContextParallelConfig(3))
    return messages


@torch.no_grad()
def from_pretrained_worker(folder: str) -> tuple[float, str]:
    """diffusers 0.41 and later fail here with an AttributeError under their own config."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    if dist.get_rank() == 0:
        model.save_pretrained(folder)
    dist.barrier()
    loaded = config.model_class.from_pretrained(folder, parallel_config=ContextParallelConfig(2))
    error = relative_l2(config.get_output(loaded, inputs), config.get_output(model, inputs))
    return error, str(loaded.parallelism.config)


@torch.no_grad()
def cache_worker() -> list[float]:
    """Errors of five steps, of which pyramid attention broadcast skips the attention of some on every rank."""
    config = FluxTransformerTesterConfig()
    inputs, outputs = config.get_dummy_inputs(1), []
    for parallel in (False, True):
        model = config.get_model()
        if parallel:
            enable(model, (2, 1, "p2p"))
        model.enable_cache(
            PyramidAttentionBroadcastConfig(
                spatial_attention_block_skip_range=2,
                spatial_attention_timestep_skip_range=(-1, 10_000),
                current_timestep_callback=lambda: 500,
            )
        )
        for step in range(5):
            moved = {**inputs, "hidden_states": inputs["hidden_states"] + step}
            outputs.append(config.get_output(model, moved))
    plain = config.get_output(config.get_model(), moved)
    assert relative_l2(outputs[3], plain) > 1e-4  # it does skip
    return [relative_l2(x, y) for x, y in zip(outputs[5:], outputs[:5], strict=True)]


@torch.no_grad()
def two_shapes_worker() -> list[float]:
    """The whole model compiled, and run at a second resolution, where the compiler takes sizes for symbols."""
    config = FluxTransformerTesterConfig()
    model, other, errors = config.get_model(), config.get_model(), []
    enable(model, (2, 1, "p2p"))
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    inputs = config.get_dummy_inputs(1)
    for length in (35, 33, 31):
        less = {
            **inputs,
            "hidden_states": inputs["hidden_states"][:, :length],
            "img_ids": inputs["img_ids"][:length],
        }
        errors.append(relative_l2(config.get_output(model, less), config.get_output(other, less)))
    return errors


@torch.no_grad()
def guessed_order_worker() -> str:
    """Whether text or image comes first matters to a mask over both, and diffusers' format does not say it."""
    plan = ContextParallelPlan(
        {"": {"hidden_states": split(1, 3), "encoder_hidden_states": split(1, 3)}}, ordered=False
    )
    axes = ContextParallelConfig(2).axes()
    sequence = SequenceSplit("Model", plan, axes, "p2p")
    sequence.lengths = {"encoder_hidden_states": 4, "hidden_states": 8}
    q, mask = torch.zeros(1, 6, 2, 8), torch.ones(1, 1, 1, 12, dtype=torch.bool)
    assert sequence.attend(q, q, q).shape == q.shape
    return message_of(sequence.attend, q, q, q, mask)


@torch.no_grad()
def one_mesh_worker() -> int:
    """Process groups that five times enabling leaves behind, after the first."""
    config = FluxTransformerTesterConfig()
    counts = []
    for _ in range(5):
        model = config.get_model()
        enable(model, (2, 1, "p2p"))
        config.get_output(model, config.get_dummy_inputs(1))
        model.disable_parallelism()
        counts.append(len(dist.distributed_c10d._world.pg_map))
    return counts[-1] - counts[0]


class OwnAttention(JointAttnProcessor2_0):
    """Computes its attention with plain products, past everybody."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *args, **kwargs):
        def attend(query, key, value, **kwargs):
            return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value

        with mock.patch.object(F, "scaled_dot_product_attention", attend):
            return super().__call__(attn, hidden_states, encoder_hidden_states, *args, **kwargs)


@torch.no_grad()
def past_the_schedules_worker() -> str:
    config = SD3TransformerTesterConfig()
    model = config.get_model()
    model.transformer_blocks[1].attn.set_processor(OwnAttention())
    enable(model, (2, 1, "p2p"))
    return message_of(config.get_output, model, config.get_dummy_inputs(1))


@torch.no_grad()
def offload_worker() -> list[float]:
    """Hooks that replace `forward` come before ours, and go again."""
    config = FluxTransformerTesterConfig()
    model, inputs = config.get_model(), config.get_dummy_inputs(1)
    want = config.get_output(model, inputs)
    add_hook_to_module(model, AlignDevicesHook(execution_device="cpu"))
    enable(model, (2, 1, "p2p"))
    errors = [relative_l2(config.get_output(model, inputs), want)]
    remove_hook_from_module(model, recurse=True)
    return [*errors, relative_l2(config.get_output(model, inputs), want)]


@torch.no_grad()
def other_backend_worker() -> tuple[float, float]:
    """A backend that diffusers does not know to be fit for it, under Ulysses and an all-gather ring."""
    config, name = FluxTransformerTesterConfig(), AttentionBackendName.SAGE

    def sage(query, key, value, is_causal=False, scale=None):
        calls.append(query.shape[1])
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale).transpose(1, 2)

    calls, errors = [], []
    with mock.patch.dict(_AttentionBackendRegistry._backends, {name: wrap_backend(name, sage)}):
        for parallel in ((1, 2, "p2p"), (2, 1, "allgather")):
            model, inputs = config.get_model(), config.get_dummy_inputs(2)
            want = config.get_output(model, inputs)
            enable(model, parallel)
            for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
                block.attn.processor._attention_backend = name
            errors.append(relative_l2(config.get_output(model, inputs), want))
    assert len(calls) == 8, calls
    return tuple(errors)


class TestEnableContextParallelism(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.messages = run_ranks(3, errors_worker)

    @parameterized.expand(
        [
            ("too few", "ring=2, but 3 rank(s) were started; start 2, or use ParallelConfig(ring=3)"),
            ("too many", "ring=4, but 3 rank(s) were started"),
            ("missing module", "plan of FluxTransformer2DModel names out, which this model lacks"),
            ("missing whole", "plan of FluxTransformer2DModel names blocks.*.attn, which this model lacks"),
            ("missing alone", "plan of FluxTransformer2DModel names blocks.*.attn, which this model lacks"),
            ("missing argument", "splits image, which FluxTransformer2DModel's forward does not take"),
            ("missing idle", "names perturbed, which transformer_blocks.0's forward does not take"),
            ("no gather", "gathers hidden_states nowhere, and every rank would answer with its own tokens"),
            ("mesh", "ring_degree=2, but the mesh's ring axis has 3 ranks"),
            ("other mesh", "a mesh needs an axis named 'ring' or 'ulysses'; this one has ('tp',)"),
            ("backend", "transformer_blocks.0.attn uses attention backend 'flex', which gives no log-sum-exp"),
            ("twice", "is parallel already (ContextParallelConfig(ring_degree=3"),
            ("one token", "encoder_hidden_states has 1 tokens, too few to split over 3 ranks"),
            ("short", "encoder_hidden_states has 2 tokens, too few to split over 3 ranks"),
            ("order of axes", "the axes of a mesh are nested as ring, ulysses; the order of this one is"),
            ("dropout", "attention over several ranks has no dropout"),
            ("dims", "txt_ids should have 2 dims, and its shape is [1, 11, 3]"),
            ("after errors", "True"),
            ("no plan", "SanaTransformer2DModel has no context-parallel plan: its linear attention sums keys"),
        ]
    )
    def test_message(self, name, part):
        for messages in self.messages:
            assert part in messages[name], messages[name]

    def test_from_pretrained(self):
        with tempfile.TemporaryDirectory() as folder:
            for error, config in run_ranks(2, from_pretrained_worker, folder):
                assert error <= FLOAT32_BAR and "ring_degree=2" in config, (error, config)

    def test_a_cache_that_skips_attention(self):
        for errors in run_ranks(2, cache_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    @slow
    def test_compiled_at_several_resolutions(self):
        for errors in run_ranks(2, two_shapes_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_order_of_streams_that_was_only_guessed(self):
        for message in run_ranks(2, guessed_order_worker):
            assert "depends on whether text or image comes first" in message, message

    def test_one_mesh_for_all_models(self):
        assert run_ranks(2, one_mesh_worker) == [0, 0]

    def test_attention_past_the_schedules_is_no_picture(self):
        for message in run_ranks(2, past_the_schedules_worker):
            assert "transformer_blocks.1.attn (OwnAttention) computed its attention by itself" in message, message

    def test_offloading_before_and_after(self):
        for errors in run_ranks(2, offload_worker):
            assert max(errors) <= FLOAT32_BAR, errors

    def test_backends_of_diffusers_that_know_nothing_of_it(self):
        for errors in run_ranks(2, other_backend_worker):
            assert max(errors) <= FLOAT32_BAR, errors


HOST = """
import torch, diffusers_rocm
from diffusers_rocm.distributed.launching import end_rank
from tests.models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from tests.testing_utils import relative_l2
diffusers_rocm.init("cpu")
config = FluxTransformerTesterConfig()
model, inputs = config.get_model(), config.get_dummy_inputs(1)
with torch.no_grad():
    want = config.get_output(model, inputs)
    model.enable_parallelism(config=diffusers_rocm.ContextParallelConfig(ring_degree=2))
    print("error", relative_l2(config.get_output(model, inputs), want), flush=True)
end_rank()
"""


class TestTwoHosts(TwoHosts):
    def test_a_ring_over_two_hosts(self):
        processes = []
        for number, name in enumerate(self.names):
            torchrun = f"{sys.executable} -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --node_rank={number}"
            script = f"{torchrun} --master_addr=10.77.0.1 --master_port=29511 --no-python {sys.executable} -c"
            command = ["ip", "netns", "exec", name, *script.split(), HOST]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
            root = Path(__file__).parents[2]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            processes.append(subprocess.Popen(command, env=environment, cwd=root, **pipes))
            self.addCleanup(processes[-1].kill)
        for process in reversed(processes):  # a launcher whose ranks have ended waits for the other: for node 0's last
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            assert float(out.split("error")[1]) <= FLOAT32_BAR, out
