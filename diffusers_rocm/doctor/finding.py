"""What a check found, and how findings are shown."""

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


STATUSES = OK, WARNING, PROBLEM, SKIPPED = "OK", "warning", "problem", "skipped"


@dataclass(frozen=True)
class Finding:
    """
    Attributes:
        status: OK; warning: it works, and costs time or may fail one day; problem: it cannot work, or did not when it
            was tried; skipped: there is nothing to look at.
        seen: what was seen, in one line; why, if skipped.
        fix: a command line, of a warning and a problem.
        name: of the check.
    """

    status: str
    seen: str
    fix: str = ""
    name: str = ""

    def __post_init__(self):
        assert bool(self.fix) == (self.status in (WARNING, PROBLEM)), self


def ok(seen: str) -> Finding:
    return Finding(OK, seen)


def warning(seen: str, fix: str) -> Finding:
    return Finding(WARNING, seen, fix)


def problem(seen: str, fix: str) -> Finding:
    return Finding(PROBLEM, seen, fix)


def skipped(why: str) -> Finding:
    return Finding(SKIPPED, why)


def line(finding: Finding) -> str:
    """A finding that was not skipped, its fix on the next line."""
    text = f"{finding.status:8} {finding.name:22} {finding.seen}"
    return f"{text}\n{'':9}{'':22} fix: {finding.fix}" if finding.fix else text


def summary(findings: Iterable[Finding]) -> str:
    """What was skipped, by its reason, and how many there are of each status."""
    findings = list(findings)
    reasons: dict[str, list[str]] = {}
    for each in findings:
        if each.status == SKIPPED:
            reasons.setdefault(each.seen, []).append(each.name)
    shown = "; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items())
    lines = textwrap.wrap(f"skipped: {shown}", 110, subsequent_indent="  ") if reasons else []
    counts = {status: sum(each.status == status for each in findings) for status in (PROBLEM, WARNING, OK, SKIPPED)}
    return "\n".join([*lines, ", ".join(f"{count} {status}" for status, count in counts.items())])


def as_json(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [{"name": each.name, "status": each.status, "seen": each.seen, "fix": each.fix} for each in findings]


def exit_code(findings: Iterable[Finding]) -> int:
    return int(any(each.status == PROBLEM for each in findings))
