"""What `utils/new_plan.py` drafts, for classes whose plan is known."""

import runpy
import sys
from pathlib import Path

import diffusers
import pytest
import torch

from diffusers_rocm import verify_plan
from diffusers_rocm.models.plans import TENSOR_PARALLEL_PLANS
from diffusers_rocm.models.plans.plan import TensorParallelPlan


SCRIPT = Path(__file__).parent.parent.parent / "utils" / "new_plan.py"


def draft(
    cls: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, *options: str
) -> tuple[int, str, str]:
    """Exit code, what was printed, and what was complained of."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), cls, *options])
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = dict(TENSOR_PARALLEL_PLANS)
    try:
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(SCRIPT), run_name="__main__")
    finally:
        TENSOR_PARALLEL_PLANS.clear()
        TENSOR_PARALLEL_PLANS.update(before)
    return end.value.code, *capsys.readouterr()


class TestNewPlan:
    # Separate projections; fewer key heads; a norm over all heads; a size of heads that the config does not name;
    # attention and feed-forward that end in one Linear; other names, and heads that only the modules count.
    @pytest.mark.parametrize(
        "cls",
        [
            "SD3Transformer2DModel",
            "Lumina2Transformer2DModel",
            "WanTransformer3DModel",
            "CogVideoXTransformer3DModel",
            "FluxTransformer2DModel",
            "Kandinsky5Transformer3DModel",
        ],
    )
    def test_draft_splits_what_the_plan_splits(self, cls, capsys, monkeypatch):
        code, printed, _ = draft(cls, capsys, monkeypatch)
        assert code == 0
        text, _, report = printed.partition("\n\n")
        written = {"TensorParallelPlan": TensorParallelPlan}
        exec(text, written)
        with torch.device("meta"):
            model = getattr(diffusers, cls)()
        ours = verify_plan(model, 3)
        monkeypatch.setitem(TENSOR_PARALLEL_PLANS, cls, written["TENSOR_PARALLEL_PLANS"][cls])
        assert verify_plan(model, 3).rank_bytes == ours.rank_bytes
        verified, _, todo = report.strip().rpartition("\nTODO: ")
        assert str(verify_plan(model, 2)) == verified and 0 < float(todo.partition("%")[0]) < 30
        assert "replicate:TODO" in text and "of the weights" in text

    # Both have attention of two widths; the latter shares keys in one of them.
    @pytest.mark.parametrize(
        ("cls", "heads"),
        [
            (
                "LTX2VideoTransformer3DModel",
                '"heads": ("num_attention_heads", "attention_head_dim"), "heads_32x64": (',
            ),
            ("Krea2Transformer2DModel", '"kv": ("num_key_value_heads", "attention_head_dim")'),
        ],
    )
    def test_draft_has_all_heads(self, cls, heads, capsys, monkeypatch):
        if not hasattr(diffusers, cls):
            pytest.skip(f"this diffusers has no {cls}")
        code, printed, _ = draft(cls, capsys, monkeypatch)
        assert code == 0 and heads in printed
        assert float(printed.rpartition("TODO: ")[2].partition("%")[0]) < 5

    def test_linears_that_the_draft_leaves_whole_are_named_with_their_share(self, capsys, monkeypatch):
        code, printed, _ = draft("OvisImageTransformer2DModel", capsys, monkeypatch)
        assert code == 0
        assert '"single_transformer_blocks.*.proj_mlp": "replicate:TODO",  # 27.' in printed
        assert float(printed.rpartition("TODO: ")[2].partition("%")[0]) > 40

    def test_a_class_without_a_default_config(self, capsys, monkeypatch):
        code, _, complained = draft("LatteTransformer3DModel", capsys, monkeypatch)
        assert code == 2 and "this config of LatteTransformer3DModel builds no model" in complained
        code, printed, _ = draft(
            "LatteTransformer3DModel",
            capsys,
            monkeypatch,
            "--config",
            '{"sample_size": 64, "patch_size": 2, "in_channels": 4, "caption_channels": 4096}',
        )
        assert code == 0 and '"transformer_blocks.*.attn1.to_q": "column:heads"' in printed, printed

    @pytest.mark.parametrize(
        ("cls", "code", "message"),
        [
            ("UNet2DConditionModel", 1, "this draft does not add up: "),
            ("NoSuchTransformer", 2, "exports no NoSuchTransformer"),
            ("AutoencoderTiny", 2, "names no number of heads"),
        ],
    )
    def test_what_cannot_be_drafted_is_an_error(self, cls, code, message, capsys, monkeypatch):
        ended, printed, complained = draft(cls, capsys, monkeypatch)
        assert ended == code and message in printed + complained
