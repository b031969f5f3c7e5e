"""Parts that pages share: ranks, states of runs, and durations. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Final

from opsd.agent.web.html import Html, card, join, nothing, pill, table
from opsd.collectors.base import RankFact, RunFact
from opsd.runbooks.base import Severity
from opsd.words import span

MAX_RANKS: Final = 32

STATE_TONES: Final = {"running": "good", "finished": "good", "failed": "bad", "spare": ""} | dict.fromkeys(
    ("waiting", "restarting", "stopping"), "warn"
)
"""States of a run's launcher."""
TONES: Final = {Severity.CRITICAL: "bad", Severity.WARNING: "warn", Severity.INFO: ""}


def ranks(ranks: Sequence[RankFact], now: float) -> Html:
    """A table of the ranks; ``now`` is the monotonic second of the request."""
    if not ranks:
        return card("ranks", "Ranks", nothing("No rank is on this node."))
    usual = {run: _usual([r for r in ranks if r.run == run]) for run in {r.run for r in ranks}}
    columns = ("Rank", "GPU", "State", "Phase", "For", "Step", "Step time", "Saved")
    rows = [_rank(rank, usual[rank.run], now) for rank in ranks[:MAX_RANKS]]
    more = nothing(f"and {len(ranks) - MAX_RANKS} more: /api/v1/ranks") if len(ranks) > MAX_RANKS else Html("")
    return card("ranks", "Ranks", join((table("Ranks", columns, rows), more)))


def _usual(ranks: Sequence[RankFact]) -> float:
    """The median of the ranks' last step times, 0 if there is none."""
    times = [rank.steps[-1].duration_s for rank in ranks if rank.steps]
    return median(times) if times else 0.0


def _rank(rank: RankFact, usual_s: float, now: float) -> Sequence[object]:
    last = rank.steps[-1] if rank.steps else None
    slow = last is not None and usual_s > 0 and last.duration_s > 1.2 * usual_s
    live = rank.live and rank.process not in ("Z", "T")
    took = f"{last.duration_s:.3f} s" if last else "–"
    return (
        f"{rank.run} {rank.rank}",
        "–" if rank.gpu is None else rank.gpu,
        _rank_state(rank),
        rank.phase,
        span(now - rank.phase_since) if live else "–",
        last.step if last else "–",
        pill(took, "warn") if slow else took,
        "–" if rank.committed_step is None else rank.committed_step,
    )


def _rank_state(rank: RankFact) -> Html:
    if rank.state == "finished":
        return pill("finished", "good")
    if rank.process is None:
        return pill("gone", "bad")
    stopped = {"T": "stopped", "Z": "zombie"}.get(rank.process)
    return pill(stopped, "warn") if stopped else pill("running", "good")


def run_state(run: RunFact) -> Html:
    """The state of a run on this node, as a pill."""
    said = run_state_text(run)
    return pill(said, STATE_TONES.get(said, "bad"))


def run_state_text(run: RunFact) -> str:
    """The state of a run on this node. One that is over needs no launcher."""
    return run.state if run.alive or run.state in ("finished", "failed") else f"{run.state}, no launcher"


def phase_shares(ranks: Sequence[RankFact]) -> str:
    """The phases of the last steps by their share, largest first."""
    spent: dict[str, float] = {}
    for rank in ranks:
        for step in rank.steps:
            for phase, seconds in step.phase_s.items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    total = sum(spent.values())
    shares = sorted(((seconds / total, phase) for phase, seconds in spent.items() if seconds > 0), reverse=True)
    return ", ".join(f"{phase} {share:.0%}" for share, phase in shares[:4] if share >= 0.005) or "–"
