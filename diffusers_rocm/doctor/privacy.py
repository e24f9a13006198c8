"""What is taken out of texts that are made to be shown to others."""

import getpass
import os
import re
import socket
from pathlib import Path


# What is private in a value, whoever's it is, and what is shown instead.
PRIVATE = (
    (re.compile(r"(?<=://)[^/\s]*@"), "HIDDEN@"),
    (re.compile(r"(?<=[?&])([\w-]*(?:token|secret|password|key|signature)=)[^&\s]+", re.IGNORECASE), r"\1HIDDEN"),
    (re.compile(r"\b(?:hf_|gh[opsru]_|npm_|AKIA)[A-Za-z0-9]{16,}"), "HIDDEN"),
    (re.compile(r"\b(?:github_pat_|glpat-|xox[a-z]-|sk-|pypi-)[\w-]{16,}"), "HIDDEN"),
    (re.compile(r"\beyJ[\w-]{8,}\.[\w.-]+"), "HIDDEN"),  # a JSON web token
    (re.compile(r"(/home/|/Users/)[^/\s:;,'\"]+"), r"\1USER"),
)
_INSTEAD = re.compile(r"~|(?:\b|(?<=_))(?:USER|HOST|HIDDEN)\b")


def without_names(text: str) -> str:
    """The text without home folders, the user, the machine, and what looks like a token or a password."""
    if home := _home():
        text = re.sub(rf"(?<![\w.~-]){re.escape(home)}(?![\w.-])", "~", text)
    for pattern, instead in PRIVATE:
        text = pattern.sub(instead, text)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # an id without a name
        user = ""
    names = {name: "USER" for name in (user, os.environ.get("SUDO_USER", "")) if name != "root"}
    for name, instead in (names | {socket.gethostname(): "HOST"}).items():
        if name:
            # torch puts its cache into /tmp/torchinductor_USER, and says so in the environment.
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", instead, text)
    return text


def _home() -> str:
    """Empty where there is none, or where every path would be in it."""
    try:
        home = Path.home()
    except RuntimeError:  # an id without a name, and no HOME
        return ""
    return str(home) if home.is_absolute() and len(home.parts) > 1 else ""


def is_whole(text: str) -> bool:
    """Whether nothing seems to have been taken out of the text, so that it may be pasted."""
    return not _INSTEAD.search(text)
