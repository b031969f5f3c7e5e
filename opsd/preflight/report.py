"""The report: what a preflight found on one node, the input of every output format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pydantic import TypeAdapter, ValidationError

from opsd.preflight.base import Finding, Verdict

FORMAT: Final = 1


class ReportError(Exception):
    """The file is not a preflight report; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Value:
    """A judged measurement. ``normal`` is the yardstick that it missed, or else the best known one."""

    measure: str
    subject: str
    value: float
    unit: str
    verdict: Verdict
    normal: float | None = None
    better: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """One check of a report. ``reason`` says why it did not apply or could not run; times are seconds."""

    check: str
    title: str
    verdict: Verdict
    optional: bool = False
    reason: str = ""
    values: tuple[Value, ...] = ()
    findings: tuple[Finding, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    started: float = 0.0
    seconds: float = 0.0
    runbook: str = ""
    log: str = ""

    @property
    def failed(self) -> bool:
        """Whether the node must not be used because of it. COULD_NOT_RUN fails unless the check is optional."""
        return self.verdict is Verdict.FAIL or (self.verdict is Verdict.COULD_NOT_RUN and not self.optional)

    @property
    def sentences(self) -> list[str]:
        """The problems, worst first: what, how far from normal, what to do."""
        return [sentence for _, sentence in self.problems]

    @property
    def problems(self) -> list[tuple[Verdict, str]]:
        """The sentences, each with its own verdict."""
        runbook = f"see `opsd runbook show {self.runbook}`" if self.runbook else ""
        if self.reason:
            return [(self.verdict, _sentence(f"{self.title}: {self.reason}", runbook if self.failed else ""))]
        return [(f.verdict, _sentence(f"{self.title}: {f.summary}", f.advice, runbook)) for f in self.findings]


@dataclass(frozen=True, slots=True)
class Report:
    """A preflight of one node. ``started`` and ``ended`` are wall seconds; ``version`` is opsd's."""

    node: str
    profile: str
    version: str
    started: float
    ended: float
    results: tuple[Result, ...]
    interrupted: bool = False
    format: int = FORMAT

    @property
    def passed(self) -> bool:
        """Whether at least one check ran and none failed. A preflight without a check has not passed."""
        ran = any(r.verdict not in (Verdict.NOT_APPLICABLE, Verdict.COULD_NOT_RUN) for r in self.results)
        return ran and not self.interrupted and not any(result.failed for result in self.results)

    @property
    def word(self) -> str:
        """The verdict: "unfit" if a check has failed, "fit" if the preflight has passed, "unknown" otherwise.

        A check that could not run, or did not end, says nothing about the node: the installation may be broken.
        """
        if any(result.verdict is Verdict.FAIL for result in self.results):
            return "unfit"
        return "fit" if self.passed else "unknown"

    @property
    def failures(self) -> str:
        """The profile and the first checks that failed, for reasons in Slurm; ``failed_checks`` reads it back."""
        failed = [result.check for result in self.results if result.failed]
        names = ", ".join(failed[:3]) + (f" and {len(failed) - 3} more" if len(failed) > 3 else "")
        return f"{self.profile} failed: {names or 'no check ran'}"

    @property
    def counts(self) -> Counter[Verdict]:
        """How many checks ended with each verdict."""
        return Counter(result.verdict for result in self.results)

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        counts = self.counts
        parts = [f"{counts[verdict]} {text}" for verdict, text in _WORDS if counts[verdict]]
        verdict = "interrupted" if self.interrupted else "passed" if self.passed else "FAILED"
        return f"{self.node} {verdict} preflight ({self.profile}): {', '.join(parts) or 'no check ran'}"

    def to_json(self) -> str:
        """The report as JSON text, for ``from_json``."""
        return _ADAPTER.dump_json(self, indent=1).decode() + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Raises ReportError if ``text`` is not a report, or has another format."""
        try:
            report = _ADAPTER.validate_json(text)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = ".".join(map(str, problem["loc"]))
            raise ReportError(f"not a preflight report: {where + ': ' if where else ''}{problem['msg']}") from error
        if report.format != FORMAT:
            raise ReportError(f"a report of format {report.format}; this opsd reads format {FORMAT}")
        return report


def failed_checks(reason: str) -> list[str]:
    """The checks that the failures of a report name in ``reason``, the first three; empty if there are none in it."""
    found = _FAILURES.search(reason)
    return found[1].split(", ") if found else []


_ADAPTER = TypeAdapter(Report)
_FAILURES: Final = re.compile(r"\w failed: (\w+(?:, \w+)*)(?: and \d+ more)?(?:;|$)")
_WORDS: Final = (
    (Verdict.FAIL, "failed"),
    (Verdict.COULD_NOT_RUN, "could not run"),
    (Verdict.WARN, "with a warning"),
    (Verdict.PASS, "passed"),
    (Verdict.NOT_APPLICABLE, "not applicable"),
)


def _sentence(*parts: str) -> str:
    text = "; ".join(part.rstrip(".") for part in parts if part)
    return f"{text}."
