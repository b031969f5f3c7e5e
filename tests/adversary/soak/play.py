"""The soak: an agent in act mode, three users who train, all attacks at once, and faults of the hardware on a plan."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from opsd.agent.store import MAX_ENDED, Store
from opsd.collectors.lib.kernel.xid import CATALOGUE, XidAction
from opsd.ports import free_port
from opsd.runbooks.base import Evidence, Incident, State
from opsd.simulated.gpus import SimulatedGpus, build
from tests.adversary import bombs
from tests.adversary.attacker import NOBODY, Attacker
from tests.adversary.attacks import false_exporter, hold_connections, make_files, make_runs
from tests.adversary.node import Node
from tests.adversary.soak import floods
from tests.adversary.soak.honest import train
from tests.adversary.soak.observe import Scraper, highest_mib, inbox, resident_mib, scrape, series, total
from tests.adversary.soak.verdict import (
    Plant,
    floors,
    incidents_verdict,
    memory_verdict,
    peak_verdict,
    scrape_verdict,
    slope,
    ticks_verdict,
)
from tests.fakes.clock import until
from tests.fakes.incidents import incident
from tests.fakes.tree import FUSE, silent_mount

USERS = (("alpha", NOBODY - 3, 0, 4), ("beta", NOBODY - 4, 4, 2), ("gamma", NOBODY - 5, 6, 2))
"""Name of a run, its user, its first GPU, its ranks."""
PLANT_EVERY_S = 20.0
RELOAD_EVERY_S = 15.0
ENDS_WITHIN_S = 45.0
"""Before the end no more faults are planted for this long, so that the last incident is over."""
GROWS_S = 1200.0
"""Memory grows until the agent's window is full, and users who have used up their incidents may open more 600 s later;
the list of those that are over is full from the start."""
AMBIGUOUS = (13, 31, 94)
CODES = [code for code, info in CATALOGUE.items() if info.action is XidAction.RESTART_APP and code not in AMBIGUOUS]
PAGES = ("/", "/api/v1/ranks", "/metrics", "/api/v1/status", "/api/v1/incidents?limit=1000&symptoms=1", "/fleet")
"""Those that cost most."""
BROKEN = (
    "[agent\n",
    "[agent]\ninterval_s = -1\n",
    "[policy]\nmode = 7\n",
    "\0\0",
    "[agent]\nweb_config = '/dev/zero'\n",
)


def play(seconds: float, *, files: int = 60_000, runs: int = 300, nice: int = 10) -> dict[str, Any]:
    """Run the soak and return what was measured; ``verdict`` is "good", or what was wrong in words.

    Attackers and trainers are started with ``nice``: the two cores of a test machine stand for the hundred of a node.
    """
    window_s = min(GROWS_S / 2, max(20.0, seconds / 6))
    with ExitStack() as stack:
        url, told = stack.enter_context(inbox())
        node, dcgm, ras = stack.enter_context(_node(window_s, url))
        if FUSE.exists():
            _mount_over_runs(node, stack)
        agent = stack.enter_context(_agent(node))
        niced = os.nice(0)
        os.nice(nice)  # inherited by what is started from here on; the agent runs already
        try:
            users = [stack.enter_context(contextlib.closing(Attacker(uid))) for _, uid, _, _ in USERS]
            _train(node, users)
            uids = (NOBODY, NOBODY - 1, NOBODY - 2, NOBODY - 6)
            attackers = [stack.enter_context(contextlib.closing(Attacker(uid))) for uid in uids]
            _attack(node, dcgm, ras[0], *attackers[:2], files=files, runs=runs)
            _bomb(node, ras[1], *attackers[2:])
        finally:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, 0, niced)
        scraper = Scraper(node.port, agent.pid, [name for name, *_ in USERS])
        before = series(until(lambda: scrape(node.port)) or "")
        scraper.start()
        began = time.monotonic()
        stop = threading.Event()
        reloads = threading.Thread(target=_reload, args=(node, agent.pid, stop), daemon=True)
        reloads.start()
        plants = list(_plant(node, began + max(seconds - ENDS_WITHIN_S, seconds / 2)))
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        stop.set()
        reloads.join()
        seen = scraper.stop()
        elapsed = time.monotonic() - began
        alive = agent.poll() is None
        highest = highest_mib(agent.pid) if alive else 0.0
        ended = [attack for one in (*users, *attackers) for attack in one.ended]
        for user in users:
            user.close()
        time.sleep(3.0)  # what the trainers have written last is read
        last = series(scrape(node.port) or "")
        journal = _journal(node)
        warnings = sum(
            path.read_text().count("planted") for path in (node.folder / "runs").glob("*/logs/gen-0000/rank-0000.log")
        )
        lost = [] if alive else ["the agent has ended"]
        lost += [f"nobody attacked any more with {attack}" for attack in ended]
        missing = warnings - total(seen.last | last, "opsd_nccl_log_messages_total", 'kind="warning"')
        if missing > len(USERS) * 2:  # a run that has ended is no longer looked at
            lost.append(f"{missing:g} of {warnings} warnings of NCCL are not counted")
        xids = total(last, "opsd_xid_total")
        if xids != len(plants):
            lost.append(f"{xids:g} Xids are counted, {len(plants)} were planted")
        ticks = total(seen.last, "opsd_agent_ticks_total") - total(before, "opsd_agent_ticks_total")
        memory = [(at, mib) for at, mib in seen.memory if at >= min(GROWS_S, seconds / 2)]
        growth = slope(memory)
        lost += incidents_verdict(plants, journal, told)
        faults = [
            *lost,
            memory_verdict(growth, memory[-1][0] - memory[0][0]),
            peak_verdict(highest),
            *scrape_verdict(seen),
            *ticks_verdict(last),
        ]
        faults = [fault for fault in faults if fault]
        times = sorted(seen.scrapes)
        every = max(1, len(seen.memory) // 12)
        return {
            "seconds": elapsed,
            "rss_mib": {f"at {at / 60:.1f} min": mib for at, mib in seen.memory[::every]},
            "rss_end_mib": resident_mib(agent.pid) if alive else 0.0,
            "rss_max_mib": max(mib for _, mib in seen.memory),
            "rss_highest_mib": highest,
            "rss_floors_mib": [round(mib, 1) for _, mib in floors(memory)],
            "rss_slope_mib_per_hour": growth.value,
            "rss_slope_low": growth.low,
            "rss_slope_high": growth.high,
            "scrapes": len(times),
            "scrapes_unanswered": len(seen.unanswered),
            "scrape_p50_ms": 1e3 * times[len(times) // 2],
            "scrape_p99_ms": 1e3 * times[int(0.99 * len(times))],
            "scrape_max_ms": 1e3 * times[-1],
            "ticks": ticks,
            "evaluation_oldest_s": seen.stale_s,
            "planted_xids": len(plants),
            "planted_warnings": warnings,
            "incidents_in_journal": len(journal) - MAX_ENDED,
            "notifications": len(told),
            "lost": "; ".join(lost[:12]) or "nothing",
            "verdict": "; ".join(faults[:12]) or "good",
        }  # fmt: skip


@contextlib.contextmanager
def _node(window_s: float, webhook: str) -> Iterator[tuple[Node, int, tuple[int, int]]]:
    """The node, and the ports of its exporter and of RAS, which may listen at two."""
    folder = Path(tempfile.mkdtemp(prefix="opsd-soak-", dir="/dev/shm"))
    folder.chmod(0o755)
    try:
        with SimulatedGpus.create(folder / "gpus.state", count=8) as gpus:
            node = Node(folder, build(folder), gpus)
            dcgm, ras = free_port(), (free_port(), free_port())
            node.config.write_text(node.config.read_text().replace("[agent]\n", f"[agent]\nwindow_s = {window_s}\n"))
            node.configure(
                "[notify]", f'webhook = "{webhook}"',
                "[dcgm]", f'url = "http://localhost:{dcgm}/metrics"',
                "[nccl]", f'ras = ["127.0.0.1:{ras[0]}", "127.0.0.1:{ras[1]}"]', "interval_s = 1.0",
            )  # fmt: skip
            (folder / "runs").mkdir()
            (folder / "runs").chmod(0o1777)
            yield node, dcgm, ras
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _agent(node: Node) -> Iterator[subprocess.Popen[str]]:
    """The agent, whose log goes into a file, with as much behind it as it remembers."""
    with Store(node.folder / "state/journal.db", time.time()) as store:
        store.write(map(_past, range(MAX_ENDED)), [])
    with (node.folder / "agent.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "opsd", "agent", "--config", str(node.config)],
            env=node.environment, stdout=log, stderr=log, text=True,
        )  # fmt: skip
        try:
            until(lambda: node.get("/readyz"))
            yield process
        finally:
            process.terminate()
            process.wait(30)


def _past(number: int) -> Incident:
    """One of those that are over, as large as the soak's own are on average."""
    at = time.time() - 7200 + number
    evidence = tuple(Evidence(f"{number}: what was seen {look} times, in a line", "kernel", at) for look in range(6))
    one = incident(f"trouble-{number}", state=State.RESOLVED, opened_at=at, resolved_at=at + 60, evidence=evidence)
    return replace(one, actions=one.actions * 2, last_seen_at=at + 60)


def _train(node: Node, users: Sequence[Attacker]) -> None:
    for (name, _, first, ranks), user in zip(USERS, users, strict=True):
        process = user.start(train, str(node.shm), str(node.folder / "runs"), name, first, ranks)
        for gpu in range(first, first + ranks):
            node.gpus[gpu].load(utilization=97, power_watts=600, memory_ratio=0.8)
            node.gpus[gpu].set_processes([(process.pid, 60 << 30)])


def _attack(node: Node, dcgm: int, ras: int, one: Attacker, other: Attacker, *, files: int, runs: int) -> None:
    shm = str(node.shm)
    incomplete = "GET /metrics HTTP/1.1\r\nX-Slow: "
    complete = "GET /job/4242 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    one.start(hold_connections, node.port, incomplete, 100)
    one.start(hold_connections, node.port, "", 100)
    other.start(hold_connections, node.port, complete, 30)
    one.start(floods.odd_requests, node.port)
    xid = f'DCGM_FI_DEV_ROW_REMAP_FAILURE{{gpu="0",UUID="{node.gpus[0].uuid}"}} 1\n'
    one.start(false_exporter, "127.0.0.1", dcgm, xid)
    one.start(make_runs, shm, runs, True)
    one.start(make_files, shm, files)
    one.start(floods.change_runs, shm)
    other.start(floods.flood_events, shm, "flood")
    other.start(floods.burst_of_failures, shm, 40, 60.0)
    other.start(floods.slow_ras, shm, "lead", ras)
    other.start(floods.slow_launcher, shm, "slow")
    other.start(floods.crash_again_and_again, f"{shm}/crash", "mlx5_core 0000:3b:00.0: event[error]: 9 UE", 20.0)


def _bomb(node: Node, ras: int, one: Attacker, other: Attacker) -> None:
    """What makes the agent need memory, all at once, in fewer runs than there is room for."""
    shm, runs = str(node.shm), str(node.folder / "runs")
    for number, user in enumerate((one, other)):
        user.start(bombs.full_runs, shm, f"full{number}", 6, 256)
        user.start(bombs.dump_bombs, shm, runs, f"dumps{number}", 2.0)
        user.start(bombs.ask_for_all, node.port, [*PAGES, f"/job/long-{number}"], 60)
    one.start(bombs.ras_bombs, shm, "ras", ras)
    other.start(bombs.long_ledgers, shm, runs, "long", 2)


def _mount_over_runs(node: Node, stack: ExitStack) -> None:
    """What never answers, over a run's folder and over its pages."""
    for number, over in enumerate(("", "run.json", "rank-0000.page", "events.jsonl")):
        folder = node.shm / f"mounted-{number}"
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        if over:
            (folder / over).touch()
            os.chown(folder / over, NOBODY, NOBODY)
        stack.enter_context(silent_mount(folder / over, NOBODY))


def _reload(node: Node, agent: int, stop: threading.Event) -> None:
    """Turn by turn a broken configuration and the good one."""
    good = node.config.read_text()
    for number in count():
        node.config.write_text(BROKEN[number // 2 % len(BROKEN)] if number % 2 == 0 else good)
        os.kill(agent, signal.SIGHUP)
        if stop.wait(RELOAD_EVERY_S):
            node.config.write_text(good)
            return


def _plant(node: Node, end: float) -> Iterator[Plant]:
    """One Xid after the other, each of another code, on each GPU in turn."""
    time.sleep(min(15.0, max(0.0, end - time.monotonic())))
    for number in count():
        if time.monotonic() > end:
            return
        gpu, code = node.gpus[number % len(node.gpus)], CODES[number % len(CODES)]
        plant = Plant(time.time(), gpu.uuid, code)
        gpu.raise_xid(code)
        yield plant
        time.sleep(PLANT_EVERY_S)


def _journal(node: Node) -> list[dict[str, Any]]:
    """The incidents in the journal."""
    with contextlib.closing(sqlite3.connect(f"file:{node.folder / 'state/journal.db'}?mode=ro", uri=True)) as database:
        return [json.loads(document) for (document,) in database.execute("SELECT document FROM incidents")]
