"""The options by which commands start their ranks: what is wrong is one line, before any rank is started."""

import contextlib
import io
import logging
import os
import re
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from parameterized import parameterized

from diffusers_rocm import commands
from diffusers_rocm.commands.choose_mesh import choose_mesh


class TestOptions(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        (self.folder / "file").write_text("")

    def run_here(self, *arguments: str, **environment: str) -> tuple[int, str, str, mock.Mock]:
        """Exit code, stdout, stderr, and the launcher that was called, or was not."""
        filled = [argument.format(folder=self.folder) for argument in arguments]
        out, err = io.StringIO(), io.StringIO()
        outputs = ["--prompt", "x", "--out", f"{self.folder}/out"] if filled[0] == "generate" else []
        module = "generate" if filled[0] == "generate" else "ranks"
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            mock.patch.dict(os.environ, environment),
        ):
            with mock.patch(f"diffusers_rocm.commands.{module}.launch", return_value=0) as launch:
                try:
                    code = commands.main([*filled, *outputs])
                except SystemExit as error:  # argparse
                    code = error.code
        return code, out.getvalue(), err.getvalue(), launch

    @parameterized.expand(
        [
            ("no GPUs", ["--gpus", "0"], "--gpus takes a number from 1, or all; got '0'"),
            ("heads", ["--device", "cpu", "--ulysses", "9"], "--ulysses 9 exceeds the 8 attention heads of .*--ring"),
            ("both", ["--device", "cpu", "--ulysses", "3", "--tp", "3"], ".*use --tp <= 2"),
            ("encoder", ["--text-encoders", "nope=shard"], "--text-encoders nope=shard: .* has text_encoder, "),
            ("word", ["--gpus", "two"], "--gpus takes a number from 1, or all; got 'two'"),
            ("negative", ["--gpus", "-1"], "--gpus takes a number from 1, or all; got '-1'"),
            ("all of none", ["--gpus", "all", "--device", "cpu"], "--gpus all: there are no GPUs; with --device cpu"),
            ("too many", ["--gpus", "99", "--device", "cuda"], "99 ranks need as many GPUs and 0 are visible"),
            ("other degrees", ["--gpus", "4", "--tp", "3"], r"--gpus 4: tp=3, but 4 rank\(s\) were started; start 3"),
            ("indivisible", ["--gpus", "4", "--tp", "3", "--dp", "-1"], "--gpus 4: .*which 3 does not divide"),
            ("no nodes", ["--nnodes", "0"], "--nnodes must be at least 1; got 0"),
            ("no rank", ["--nnodes", "2", "--master-addr", "localhost"], "--nnodes 2 needs --node-rank"),
            ("no address", ["--nnodes", "2", "--node-rank", "0"], "--nnodes 2 needs --master-addr"),
            ("rank alone", ["--node-rank", "1"], "--node-rank and --master-addr are for several nodes"),
            ("one node", ["--nnodes", "1", "--node-rank", "1"], "--node-rank 1, and --nnodes is 1"),
            (
                "rank too high",
                ["--nnodes", "2", "--node-rank", "2", "--master-addr", "localhost"],
                "--node-rank 2: 2 nodes are numbered from 0 to 1",
            ),
            (
                "no such host",
                ["--nnodes", "2", "--node-rank", "0", "--master-addr", "no.such.host.invalid"],
                "--master-addr 'no.such.host.invalid': .+",
            ),
            (
                "no host at all",
                ["--nnodes", "2", "--node-rank", "0", "--master-addr", "a..b"],
                "--master-addr 'a..b': .+",
            ),
            (
                "shared unequally",
                ["--nnodes", "2", "--node-rank", "0", "--master-addr", "localhost", "--tp", "3"],
                "3 ranks cannot be shared equally by 2 nodes",
            ),
            ("port", ["--port", "-1"], "--port -1 is not a port number"),
            ("no timeout", ["--node-timeout", "0"], "--node-timeout must be a number of seconds above 0; got 0"),
            ("endless", ["--node-timeout", "nan"], "--node-timeout must be a number of seconds above 0; got nan"),
            ("restarts", ["--restarts", "-1"], "--restarts must be at least 0; got -1"),
            ("log folder", ["--log-dir", "{folder}/file"], "cannot write to .*/file: "),
        ]
    )
    def test_bad_input(self, name, arguments, message):
        code, _, err, launch = self.run_here("generate", *arguments)
        assert code == 2 and not launch.called, err
        assert re.fullmatch(f"diffusers-rocm: {message}.*\n", err), err

    def test_other_commands_too(self):
        bench = (
            "bench",
            "step",
            "--mesh",
            "tp=2",
            "--config",
            "num_layers=1",
            "num_single_layers=1",
            "--device",
            "cpu",
        )
        code, _, err, launch = self.run_here(*bench, "--nnodes", "2")
        assert (
            code == 2
            and not launch.called
            and err == ("diffusers-rocm: --nnodes 2 needs --node-rank; outside Slurm nothing else says it\n")
        )
        where = ("--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost", "--port", "4321")
        assert self.run_here(*bench, *where)[0] == 0
        (world, _), options = self.run_here(*bench, *where)[3].call_args
        nodes = options["nodes"]
        assert (world, nodes.count, nodes.rank, nodes.address, nodes.port) == (2, 2, 1, "localhost", 4321)

    @parameterized.expand(
        [
            ("SLURM_NNODES", "two", "SLURM_NNODES=two is no number"),
            ("SLURM_JOB_NODELIST", "[", "Slurm's list of nodes, '\\[', begins with no name"),
            ("SLURM_NODEID", "5", "--node-rank 5: 2 nodes are numbered from 0 to 1"),
        ]
    )
    def test_odd_slurm_variables(self, name, value, message):
        slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost"} | {name: value}
        code, _, err, launch = self.run_here("generate", "--tp", "2", **slurm)
        assert code == 2 and not launch.called and re.fullmatch(f"diffusers-rocm: {message}.*\n", err), err

    def test_what_is_given_wins_over_slurm(self):
        slurm = {"SLURM_NNODES": "2", "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": "localhost"}
        assert self.run_here("generate", "--tp", "2", **slurm)[3].call_args.kwargs["nodes"].count == 2
        assert self.run_here("generate", "--tp", "2", "--nnodes", "1", **slurm)[3].call_args.kwargs["nodes"].count == 1

    @parameterized.expand(
        [
            ("no ranks", {"RANK": "0", "WORLD_SIZE": "0"}),
            ("no ranks here", {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}),
            ("a word", {"RANK": "a", "WORLD_SIZE": "2"}),
            ("beyond", {"RANK": "2", "WORLD_SIZE": "2"}),
            ("no address", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}),
            ("no port", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "x"}),
            ("no such port", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "99999"}),
            ("no node", {"RANK": "0", "WORLD_SIZE": "2", "GROUP_RANK": "x"}),
        ]
    )
    def test_ranks_that_torchrun_would_not_make(self, _, variables):
        variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"} | variables
        code, _, err, launch = self.run_here("generate", "--device", "cpu", "--tp", "2", **variables)
        assert code == 2 and not launch.called and "not what torchrun sets for a rank" in err, err

    def test_gpus_choose_a_mesh_and_say_it(self):
        guided = ("--negative-prompt", "y")
        for arguments, world, said in (
            (("--gpus", "2"), 2, "--gpus 2: ulysses=2;"),
            (("--gpus", "4", *guided), 4, "--gpus 4: cfg=2, ulysses=2;"),
            (("--gpus", "2", *guided), 2, "--gpus 2: cfg=2;"),
            (("--gpus", "3", *guided), 3, "--gpus 3: ulysses=3;"),
            (("--gpus", "4", *guided, "--guidance", "1"), 4, "--gpus 4: ulysses=4;"),
            (("--gpus", "4", "--tp", "2", "--dp", "-1"), 4, ""),
        ):
            code, out, err, launch = self.run_here("generate", "--device", "cpu", *arguments)
            assert code == 0 and launch.call_args.args[0] == world, (arguments, err)
            assert out.startswith(said) and out.count("\n") == (said != ""), out

    def test_gpus_of_each_node(self):
        where = ("--nnodes", "3", "--node-rank", "1", "--master-addr", "localhost")
        code, out, err, launch = self.run_here("generate", "--device", "cpu", "--gpus", "2", *where)
        assert code == 0 and launch.call_args.args[0] == 6 and "ulysses=6" in out, err

    def test_gpus_where_srun_has_started_the_ranks(self):
        nodes = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[08-09]", "SLURM_STEP_NUM_TASKS": "4"}
        slurm = nodes | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
        with mock.patch("diffusers_rocm.commands.generate.record") as record:
            with mock.patch("diffusers_rocm.commands.generate.end_rank", side_effect=KeyboardInterrupt):
                code, out, err, launch = self.run_here("generate", "--device", "cpu", "--gpus", "2", **slurm)
        (request,) = record.return_value.call_args.args
        assert code == 130 and not launch.called and (request.ulysses, out) == (4, ""), err

    def test_choose_mesh(self):
        assert choose_mesh(1, guides=True) == choose_mesh(1, guides=False) == {}
        assert choose_mesh(8, guides=True) == {"cfg": 2, "ulysses": 4}
        assert choose_mesh(5, guides=True) == {"ulysses": 5}
        assert choose_mesh(32, guides=False, heads=24) == {"ring": 2, "ulysses": 16}
        assert choose_mesh(24, guides=False, heads=24) == {"ulysses": 24}
        assert choose_mesh(7, guides=False, heads=5) == {"ring": 7}

    def test_choose_mesh_for_weights_that_do_not_fit(self):
        """FLUX.1's 24 GB: in 24 they leave no room, in 80 they do."""
        flux = {"heads": 24, "weights": 24e9}
        assert choose_mesh(4, guides=False, **flux, memory=80e9) == {"ulysses": 4}
        assert choose_mesh(4, guides=False, **flux, memory=24e9) == {"ulysses": 2, "tp": 2}
        assert choose_mesh(4, guides=False, **flux, memory=9e9) == {"tp": 4}
        assert choose_mesh(5, guides=False, **flux, memory=24e9) == {"tp": 5}
        assert choose_mesh(4, guides=True, **flux, memory=24e9) == {"cfg": 2, "tp": 2}
        assert choose_mesh(2, guides=True, **flux, memory=24e9) == {"tp": 2}
        assert choose_mesh(2, guides=True, **flux, memory=8e9) == {"tp": 2}
        assert choose_mesh(32, guides=False, **flux, memory=4e9) == {"ring": 2, "ulysses": 2, "tp": 8}
        assert choose_mesh(4, guides=False, weights=24e9, memory=8e9) == {"ulysses": 4}

    def test_gpus_look_at_their_memory(self):
        of = SimpleNamespace()  # the model in the package has 2.3 million parameters
        for total, said in ((9e6, "ulysses=2;"), (5e6, "tp=2;")):
            of.total_memory = total
            with (
                mock.patch("torch.cuda.device_count", return_value=2),
                mock.patch("torch.cuda.get_device_properties", return_value=of),
            ):
                code, out, err, launch = self.run_here("generate", "--device", "cuda", "--gpus", "2")
            assert code == 0 and launch.called and out.startswith(f"--gpus 2: {said}"), (out, err)

    def test_log_level(self):
        package = logging.getLogger("diffusers_rocm")
        self.addCleanup(package.setLevel, package.level)
        self.addCleanup(setattr, package, "handlers", package.handlers)
        for arguments, level in (([], 30), (["--verbose"], 20), (["--log-level", "debug"], 10)):
            self.run_here("generate", "--tp", "2", *arguments)
            assert package.level == level and len(package.handlers) == 1
        assert self.run_here("generate", "--log-level", "loud")[0] == 2


if __name__ == "__main__":
    unittest.main()
