"""Whatever is in the files of a run's folder: a ledger, a report and a forecast, or one sentence."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from opsd.agent.web.ledgers import forecast_of
from opsd.ledger.for_user import records_for_user
from opsd.ledger.records import LedgerError
from opsd.plan.forecast import BadPlan, Planned, Progress, brief, forecast, told
from opsd.report.page import report_page
from opsd.report.run import NoReport, Price, read_run
from opsd.report.text import text_report
from tests.fakes.fuzzing import AMOUNTS, encoded, fuzz, json_lines, objects

_STARTED = {"t": 1.0, "event": "generation_started", "generation": 1, "nodes": ["n1"], "world_size": 2, "gpus": 2}
_LOST = {"t": 8.0, "event": "node_lost", "generation": 1, "lost": "n1", "silent_s": 1.0}
_RESUMED = {"t": 9.5, "event": "resumed", "generation": 2, "step": 3, "recovered_s": 1.5, "lost_steps": 2}
_ENDED = {"t": 10.0, "event": "finished", "generation": 2, "exit_code": 0, "reason": "r"}
_STEP = {"t": 5.0, "step": 4, "generation": 1, "step_s": 1.0, "data_s": 0.1, "checkpoint_s": 0.1, "evaluation_s": 0.1,
         "loss": 2.0, "tokens_per_s": 9.0, "tokens": 100}  # fmt: skip
_STEPS = {"t": 7.0, "step": 9, "generation": 1, "step_s": 5.0, "steps": 5, "new_tokens": 50}
_PLAN = {
    "made": 0, "gpus": 8, "nodes": 2, "tokens": 1e12, "days": 30, "training_days": 27, "mttf_s": 4e5, "spares": 1,
    "outages": 4e-3, "repair_s": 6e5, "clumps": 3, "overheads": {"failures": 0.04, "evaluation": 0.02},
}  # fmt: skip
_EXPERTS = {"step": 4, "steps": 4, "first_layer": 1, "loads": [[1, 2], [3, 4]]}

Files = tuple[bytes, bytes, bytes, bytes]
"""Events, steps, plan and loads of experts."""
SEEDS: tuple[Files, ...] = (
    (b"", encoded({**_STEPS, "new_tokens": "many"}), b"{}", b""),
    (b"", encoded({**_STEP, "step": float("inf")}), b"{}", b""),
    (encoded({**_LOST, "event": []}), encoded({**_STEP, "t": float("nan")}), b"{}", b""),
    (b"", encoded(_STEP), encoded({**_PLAN, "outages": 1.0, "repair_s": 1e-300, "mttf_s": 1e-300}), b""),
    (b"", encoded(_STEP), encoded(_PLAN), encoded({**_EXPERTS, "loads": [[float("inf")]]})),
)


@AMOUNTS
def test_no_run_folder_is_a_bug(amount: int, memory_folder: Path) -> None:
    """Lines before and after the odd ones count."""

    def look(files: Files) -> None:
        event, step, plan, experts = files
        started, rest = [encoded(_STARTED)], [encoded({**_STARTED, "t": 9.0, "generation": 2}), encoded(_ENDED)]
        (memory_folder / "events.jsonl").write_bytes(b"\n".join([*started, event, *rest, b""]))
        (memory_folder / "metrics.jsonl").write_bytes(b"\n".join([encoded(_STEP), step, encoded(_STEPS), b""]))
        (memory_folder / "plan.json").write_bytes(plan)
        (memory_folder / "experts.jsonl").write_bytes(experts)
        with suppress(LedgerError):
            made = records_for_user(memory_folder, os.getuid())
            assert made["steps"] >= 1 and made["tokens"] is not None
            if found := forecast_of(made):
                assert brief(found) and told(found)
        with suppress(NoReport):
            run = read_run(memory_folder)
            assert text_report(run, Price()) and report_page(run, Price()) and run.as_dict()

    files = st.tuples(
        json_lines(_LOST, _RESUMED, _ENDED),
        json_lines(_STEP, _STEPS),
        objects(_PLAN).map(encoded),
        json_lines(_EXPERTS),
    )
    fuzz(look, files, amount, SEEDS)


@AMOUNTS
def test_no_plan_is_a_bug(amount: int) -> None:
    """At whatever stage its run is."""

    def look(drawn: tuple[bytes, float, float, int]) -> None:
        plan, productive, tokens, lost = drawn
        with suppress(BadPlan):
            progress = Progress({"productive": productive, "restart": 1.0}, tokens, lost)
            if found := forecast(Planned.parse(plan.decode()), progress):
                assert brief(found) and told(found)

    seconds, tokens = st.floats(0, 1e18), st.floats(0, 1e18)
    edges = st.sampled_from([1e-300, 1e-12, 1e-3, 1.0, 59.0, 100.0, 2e4, 3e7, 1e12])
    numbers = st.fixed_dictionaries({name: edges for name, value in _PLAN.items() if not isinstance(value, dict)}).map(
        lambda drawn: encoded(
            {**_PLAN, **drawn, "nodes": max(1, round(min(drawn["nodes"], 2e4))), "spares": 0, "gpus": 8}
        )
    )
    fuzz(look, st.tuples(numbers, seconds, tokens, st.integers(0, 10**6)), amount)
