"""What is shown to others names nobody, and is otherwise as it was."""

import getpass
import socket
from pathlib import Path

import pytest

from diffusers_rocm.doctor.privacy import is_whole, without_names


@pytest.fixture(autouse=True)
def somebody(monkeypatch):
    """On a machine of another name than any word here."""
    monkeypatch.setattr(getpass, "getuser", lambda: "somebody")
    monkeypatch.setattr(socket, "gethostname", lambda: "thatbox")
    monkeypatch.setenv("HOME", "/srv/people/somebody")
    monkeypatch.delenv("SUDO_USER", raising=False)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("/srv/people/somebody/x:/srv/people/somebody", "~/x:~"),
        ("/srv/people/somebody2/x", "/srv/people/somebody2/x"),  # another folder that begins alike
        ("/data/srv/people/somebody/x", "/data/srv/people/USER/x"),
        ("/home/alice/ext:/Users/bob", "/home/USER/ext:/Users/USER"),
        ("https://alice:s3cretpw@proxy/x", "https://HIDDEN@proxy/x"),
        ("https://proxy/x?a=1&api_key=s3cret&b=2", "https://proxy/x?a=1&api_key=HIDDEN&b=2"),
        ("hf_abcdefghijklmnop", "HIDDEN"),
        ("a=ghp_0123456789abcdefghij,b", "a=HIDDEN,b"),
        ("somebody on thatbox", "USER on HOST"),
        ("/tmp/torchinductor_somebody", "/tmp/torchinductor_USER"),
        ("/tmp/torchinductor_somebody2", "/tmp/torchinductor_somebody2"),
        ("export MIOPEN_USER_DB_PATH=/var/db", "export MIOPEN_USER_DB_PATH=/var/db"),
        ("/usr/local/cuda/lib64:/opt/rocm", "/usr/local/cuda/lib64:/opt/rocm"),
    ],
)
def test_what_is_taken_out(text, shown):
    assert without_names(text) == shown and is_whole(shown) == (shown == text)


@pytest.mark.parametrize("home", ["/", "//", "", "usr"])
def test_a_home_that_is_no_folder_of_a_user(monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    assert without_names("/usr/local/cuda") == "/usr/local/cuda"


def test_an_id_without_a_name(monkeypatch):
    """As containers are started with; the home is then what HOME says, if anything."""

    def nobody():
        raise KeyError("getpwuid(): uid not found: 1234")

    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(getpass, "getuser", nobody)
    monkeypatch.setattr(Path, "home", no_home)
    assert without_names("/opt/rocm on thatbox") == "/opt/rocm on HOST"


def test_who_called_sudo(monkeypatch):
    monkeypatch.setenv("SUDO_USER", "alice")
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    assert without_names("root, alice and malice") == "root, USER and malice"
