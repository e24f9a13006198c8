"""No words on the command line lead to a traceback: what cannot be is one line and exit code 2."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest import mock

import huggingface_hub.constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffusers_rocm import commands
from diffusers_rocm.commands import make_parser
from diffusers_rocm.pipelines.model_folder import EMBEDDED_MODEL

from ..testing_utils import slow


def parsers(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list]]:
    """`(words of a command, its options)`, those of its subcommands too."""
    inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    for action in inner:
        for name, each in action.choices.items():
            yield from parsers(each, (*words, name))
    if not inner:
        yield words, [action for action in parser._actions if action.dest != "help"]


# Of the embedded model: where a config can go wrong, and how.
CONFIGS = ("model_index.json", "transformer/config.json", "vae/config.json", "text_encoder/config.json")
ODD = st.sampled_from([None, 0, -1, 3, 1.5, float("nan"), float("inf"), 10**30, "", "eight", [], [1], {}, True])
BIG = st.sampled_from(["0", "1", "2", "3", "65536", *("9" * count for count in (10, 22, 400))])
UNITS = {"resolution": "", "frames": "", "text": "", "gpus": "", "nodes": "", "tp": "", "memory": "GB", "link": "GB/s"}


@st.composite
def odd_folders(draw: st.DrawFn) -> dict[str, str]:
    """`{file: content}`: a value that is odd or gone, or a file that is cut."""
    name = draw(st.sampled_from(CONFIGS))
    text = (EMBEDDED_MODEL / name).read_text()
    if draw(st.booleans()):
        return {name: text[: draw(st.integers(0, len(text)))]}
    config = json.loads(text)
    key = draw(st.sampled_from(sorted(config)))
    return {name: json.dumps(config | {key: draw(ODD)})}


@st.composite
def plans(draw: st.DrawFn) -> list[str]:
    """Of a folder named `model`: small in all that is not odd, so that it is quick."""
    odd = draw(st.lists(st.sampled_from(sorted(UNITS)), max_size=2, unique=True))
    given = {"gpus": "2", "resolution": "64", "text": "32", "gpu": "7800 XT"}
    given |= {name: draw(BIG) + UNITS[name] for name in odd}
    flags = draw(st.lists(st.sampled_from(["--json", "--explain", "--guidance", "--all", "--dtype=int8"]), max_size=2))
    return ["plan", "--model", "model", *(f"--{name}={value}" for name, value in given.items()), *flags]


COMMANDS = list(parsers(make_parser()))
# No path leads out of the folder where the tests are, and none is long.
TEXT = st.text(st.characters(blacklist_characters="/\\\0", blacklist_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    TEXT,
    st.integers(-3, 9).map(str),
    st.sampled_from(["1e999", "nan", "inf", "9" * 30, "tp=2", "cfg=2,tp=0", "a=b", "16GB", "a-file", "a-folder", ""]),
)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    words, actions = draw(st.sampled_from(COMMANDS))
    line = list(words)
    required = [action for action in actions if action.required]
    some = draw(st.lists(st.sampled_from(actions), max_size=4, unique_by=id)) if actions else []
    for action in (*required, *some):
        if not action.option_strings:
            line.append(draw(VALUES))
            continue
        line.append(draw(st.sampled_from(action.option_strings)))
        if action.nargs != 0:
            choices = st.sampled_from([str(each) for each in action.choices]) if action.choices else VALUES
            line += draw(st.lists(choices | VALUES, min_size=1, max_size=2 if action.nargs == "+" else 1))
    return line


@contextmanager
def nothing_runs(but: str | None = None) -> Iterator[None]:
    """In an empty folder, without a network, and with commands that only check, but for one."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stack.callback(os.chdir, before)
        os.chdir(folder)
        os.mkdir("a-folder")
        with open("a-file", "w") as file:
            file.write("a red circle\n")
        stack.enter_context(mock.patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True))
        stack.enter_context(mock.patch.dict(os.environ))
        original = argparse.ArgumentParser.parse_args

        def parse_args(self: argparse.ArgumentParser, *args, **kwargs) -> argparse.Namespace:
            found = original(self, *args, **kwargs)
            if found.command != but:
                found.run = lambda request, args, argv: 0
            return found

        stack.enter_context(mock.patch.object(argparse.ArgumentParser, "parse_args", parse_args))
        yield


class TestBadInput(unittest.TestCase):
    def test_all_commands_are_known(self):
        found = {" ".join(words) for words, _ in COMMANDS}
        assert {"generate", "plan", "doctor", "validate", "env", "bench step", "bench comm"} <= found
        assert sum(len(actions) for _, actions in COMMANDS) > 100

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(command_lines())
    def test_any_words(self, words):
        errors = StringIO()
        with nothing_runs(), redirect_stdout(StringIO()), redirect_stderr(errors):
            try:
                code = commands.main(words)
            except SystemExit as error:  # of argparse
                code = error.code
        assert code in (0, 2), (words, code)
        if code == 2:
            said = errors.getvalue()
            *_, last = said.strip().splitlines()
            assert last.startswith("diffusers-rocm") and len(last) > len("diffusers-rocm: "), (words, said)

    def test_a_word_that_no_option_takes(self):
        """Without the usage of all its options, which would hide the line."""
        for words in (
            ["generate", "--steps", "abc"],
            ["plan", "--memory", "-16GB"],
            ["bench", "step", "--mode", "x"],
            [],
        ):
            stderr = StringIO()
            with redirect_stderr(stderr), self.assertRaises(SystemExit) as ended:
                commands.main(words)
            assert ended.exception.code == 2 and stderr.getvalue().count("\n") == 1, stderr.getvalue()
            assert stderr.getvalue().endswith("; --help tells what there is\n"), stderr.getvalue()

    def test_who_reads_leaves(self):
        """`| head -1`: neither a traceback nor the exit code of a machine with problems."""
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            ended = subprocess.run(
                [sys.executable, "-m", "diffusers_rocm", "env"], stdout=pipe, stderr=subprocess.PIPE, text=True
            )
        assert ended.returncode == 141 and "BrokenPipe" not in ended.stderr, ended.stderr[-500:]

    @slow
    @settings(max_examples=50, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(plans(), st.just({}) | odd_folders())
    def test_plan_runs(self, words, changed):
        errors = StringIO()
        with nothing_runs(but="plan"), redirect_stdout(StringIO()), redirect_stderr(errors):
            shutil.copytree(EMBEDDED_MODEL, "model")
            for name, content in changed.items():
                Path("model", name).write_text(content)
            code = commands.main(words)
        assert code in (0, 1, 2), (words, changed, code)
        assert code != 2 or errors.getvalue().count("\n") == 1, (words, changed, errors.getvalue())


if __name__ == "__main__":
    unittest.main()
