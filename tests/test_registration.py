"""Importing registers, once; unregistering leaves no trace; what cannot work says what to install."""

import json
import subprocess
import sys
import textwrap
import threading
import unittest

import diffusers
import pytest
import torch
from diffusers import FluxTransformer2DModel, ModelMixin
from diffusers.models.attention_dispatch import _AttentionBackendRegistry

import diffusers_rocm
from diffusers_rocm import _requirements, registration

from .models.transformers.test_models_transformer_flux import FluxTransformerTesterConfig
from .testing_utils import run_ranks


def snapshot() -> dict[str, dict[str, int]]:
    """The identity of every attribute of every class that is touched."""
    owners = {id(owner): owner for owner, _, _ in registration._touches()}
    # Several classes of diffusers have one name.
    named = {
        f"{owner.__module__}.{owner.__name__}" if isinstance(owner, type) else getattr(owner, "__name__", index): owner
        for index, owner in enumerate(owners.values())
    }
    return {
        name: {key: id(value) for key, value in (owner if isinstance(owner, dict) else vars(owner)).items()}
        for name, owner in named.items()
    }


def parallel_worker() -> str:
    model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, attention_head_dim=16, in_channels=4)
    model.enable_parallelism(config=diffusers_rocm.TensorParallelConfig(tp=2))
    with pytest.raises(ValueError) as caught:
        diffusers_rocm.unregister()
    model.disable_parallelism()
    diffusers_rocm.unregister()
    diffusers_rocm.register()
    return str(caught.value)


def late_backend_worker() -> tuple[list[float], bool, bool]:
    """Another package puts its own attention in place of "native", before a model is parallel and while it is."""
    registry, config = _AttentionBackendRegistry, FluxTransformerTesterConfig()
    theirs = []
    diffusers_rocm.unregister()
    tables = [registry._backends, registry._supported_arg_names]
    bare = [dict(table) for table in tables]
    diffusers_rocm.register()
    native = next(backend for backend in bare[0] if backend.value == "native")

    def replace():
        def attention(query, key, value, attn_mask=None, scale=None):
            return bare[0][native](query, key, value, attn_mask=attn_mask, scale=scale)

        theirs.append(attention)
        registry._backends[native] = attention
        registry._supported_arg_names[native] = {"query", "key", "value", "attn_mask", "scale"}

    model = config.get_model()
    inputs = config.get_dummy_inputs()
    with torch.no_grad():
        wanted = model(**inputs)[0]
        replace()
        model.enable_parallelism(config=diffusers_rocm.ContextParallelConfig(ulysses_degree=2))
        outputs = [model(**inputs)[0]]
        replace()
        model.set_attention_backend("native")
        outputs.append(model(**inputs)[0])
    model.disable_parallelism()
    extended = registry._backends[native] is not theirs[-1]
    diffusers_rocm.unregister()
    put_back = registry._backends[native] is theirs[-1]
    for table, kept in zip(tables, bare, strict=True):
        table.update(kept)
    diffusers_rocm.register()
    return [((x - wanted).norm() / wanted.norm()).item() for x in outputs], extended, put_back


class TestRegistration(unittest.TestCase):
    def tearDown(self):
        diffusers_rocm.register()

    def test_unregister_restores_every_object(self):
        diffusers_rocm.unregister()
        bare = snapshot()
        assert "disable_parallelism" not in vars(ModelMixin)
        diffusers_rocm.register()
        touched = snapshot()
        changed = [
            (cls, name) for cls in touched for name in touched[cls] if touched[cls][name] != bare[cls].get(name)
        ]
        assert len(changed) == len(list(registration._touches()))
        assert (f"{ModelMixin.__module__}.ModelMixin", "enable_parallelism") in changed
        diffusers_rocm.unregister()
        assert snapshot() == bare

    def test_not_while_a_model_is_parallel(self):
        for message in run_ranks(2, parallel_worker):
            assert "call disable_parallelism() first: FluxTransformer2DModel would stay" in message

    def test_attention_backends_that_come_late(self):
        for distances, extended, put_back in run_ranks(2, late_backend_worker):
            assert max(distances) <= 1e-5 and extended and put_back

    def test_register_is_idempotent(self):
        once = snapshot()
        diffusers_rocm.register()
        diffusers_rocm.register()
        assert snapshot() == once
        diffusers_rocm.unregister()
        diffusers_rocm.unregister()
        assert "disable_parallelism" not in vars(ModelMixin)

    def test_register_from_many_threads_wraps_once(self):
        diffusers_rocm.unregister()
        original = ModelMixin.enable_parallelism
        barrier = threading.Barrier(16)

        def register():
            barrier.wait()
            diffusers_rocm.register()

        threads = [threading.Thread(target=register) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ModelMixin.enable_parallelism is not original
        assert ModelMixin.enable_parallelism.__wrapped__ is original

    def test_import_alone_registers(self):
        code = """
            import json
            from diffusers import ModelMixin
            before = ModelMixin.enable_parallelism
            import diffusers_rocm
            after = ModelMixin.enable_parallelism
            diffusers_rocm.unregister()
            print(json.dumps([after is not before, ModelMixin.enable_parallelism is before]))
        """
        output = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
        )
        assert json.loads(output.stdout.splitlines()[-1]) == [True, True]

    def test_other_configs_reach_diffusers_own_code(self):
        calls = []

        def theirs(self, *, config, cp_plan=None):
            calls.append((config, cp_plan))

        wrapped = registration_wrapper()(theirs)
        model, config = ModelMixin(), diffusers.ContextParallelConfig(ulysses_degree=2)
        wrapped(model, config=config, cp_plan={"": {}})
        assert calls == [(config, {"": {}})]


def registration_wrapper():
    return next(wrap for cls, name, wrap in registration._touches() if name == "enable_parallelism")


class TestRequirements(unittest.TestCase):
    def message(self, patch: str) -> str:
        """The error of `import diffusers_rocm` after `patch` ran, in a process of its own."""
        code = textwrap.dedent(patch) + "\nimport diffusers_rocm"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert result.returncode != 0
        return result.stderr.strip().splitlines()[-1]

    def test_torch_without_distributed(self):
        message = self.message("import torch; torch.distributed.is_available = lambda: False")
        assert message.startswith("ImportError: ") and "no torch.distributed" in message and "install" in message

    def test_no_torch(self):
        message = self.message("import sys; sys.modules['torch'] = None")
        assert message.startswith("ImportError: ") and "needs torch" in message

    def test_unsupported_diffusers(self):
        for found in ("0.36.0", "0.43.0", "0.37.0"):
            message = self.message(f"""
                import importlib.metadata as m
                real = m.version
                m.version = lambda name: {found!r} if name == "diffusers" else real(name)
            """)
            assert message.startswith("ImportError: ") and found in message and "pip install 'diffusers>=" in message

    def test_this_environment_is_supported(self):
        _requirements.check_requirements()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_requirements, "version", lambda name: "0.42.9")
            _requirements.check_requirements()


if __name__ == "__main__":
    unittest.main()
