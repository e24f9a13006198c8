"""Write docs/api.md from the docstrings of what is public."""

import argparse
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from diffusers import ModelMixin

import diffusers_rocm
from diffusers_rocm.models._modeling_parallel import OurConfig
from diffusers_rocm.models.modeling_utils import Parallelism


PAGE = Path(__file__).parent.parent / "docs" / "api.md"
HEAD = """# API

Generated from the docstrings by `python utils/make_api.py`. Importing `diffusers_rocm` puts `enable_parallelism` and
`disable_parallelism` on every model of diffusers; what a user calls beside them is in `diffusers_rocm` itself.
`AnyConfig` is any of the five.
"""
ANY_CONFIG = str(OurConfig)
SECTIONS = ("Args", "Returns", "Raises", "Attributes")


def subjects() -> Iterator[tuple[str, Callable]]:
    """Headings, and what is below them."""
    for name in sorted(diffusers_rocm.__all__, key=lambda name: (not name.endswith("Config"), name)):
        yield f"diffusers_rocm.{name}", getattr(diffusers_rocm, name)
    for name in ("enable_parallelism", "disable_parallelism"):
        yield f"model.{name}", getattr(ModelMixin, name)
    yield "model.parallelism", Parallelism


def signature(name: str, subject: Callable) -> str:
    """As it is called, one parameter a line where it is long; modules' names are left out."""
    full = inspect.signature(subject, follow_wrapped=False)
    parameters = [each for each in full.parameters.values() if each.name != "self"]
    keyword_only = [each.kind is each.KEYWORD_ONLY for each in parameters]
    words = [str(each) for each in parameters]
    if any(keyword_only):
        words.insert(keyword_only.index(True), "*")
    returns = full.replace(parameters=[])
    for separator in (", ", ",\n    "):
        inner = separator.join(words)
        inner = f"\n    {inner},\n" if "\n" in separator else inner
        text = f"{name.partition('.')[2]}({inner}){str(returns).removeprefix('()')}".replace("'", '"')
        text = text.replace(ANY_CONFIG, "AnyConfig")
        text = re.sub(r"\b(?!torch\.(?:dtype|device|float32)\b)(?:\w+\.)+(\w+)", r"\1", text)
        text = re.sub(r'<class "(\w+)">', r"\1", text)
        if len(text) <= 100:
            break
    return text


def markdown(docstring: str) -> str:
    """A docstring of Google's style: its sections as headings, what they name as lists."""
    lines = []
    for line in inspect.cleandoc(docstring).splitlines():
        section = line.rstrip(":")
        entry = re.match(r"    ([\w, ]+): (.*)", line)
        if line.endswith(":") and section in SECTIONS:
            lines += [f"**{section}**", ""]
        elif entry:
            names = ", ".join(f"`{name}`" for name in entry[1].split(", "))
            lines.append(f"- {names}: {entry[2]}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("        ") else line.removeprefix("    "))
    return re.sub(r" +$", "", "\n".join(lines), flags=re.M)


def page() -> str:
    parts = [HEAD]
    for name, subject in subjects():
        shown = "" if name == "model.parallelism" else f"```text\n{signature(name, subject)}\n```\n\n"
        parts.append(f"## {name}\n\n{shown}{markdown(subject.__doc__)}\n")
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where the page is not what the docstrings say")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        print("docs/api.md is not what the docstrings say: run python utils/make_api.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
