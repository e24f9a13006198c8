"""`diffusers-rocm plan`."""

import unittest
from contextlib import redirect_stdout
from io import StringIO

from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL


class TestPlan(unittest.TestCase):
    @parameterized.expand([(False,), (True,)])
    def test_explain(self, explain):
        output = StringIO()
        with redirect_stdout(output):
            code = commands.main(
                ["plan", "--model", str(EMBEDDED_MODEL), "--tp", "4", *(["--explain"] if explain else [])]
            )
        text = output.getvalue()
        assert code == 0 and "FluxTransformer2DModel, tp=4: at most " in text, text
        assert ("replicated on every rank" in text and "time_text_embed" in text) == explain
        assert "matches nothing" not in text and "without a rule" not in text


if __name__ == "__main__":
    unittest.main()
