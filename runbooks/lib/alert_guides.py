"""Guides of the alerts that no agent can raise as an incident: about opsd itself, and about a run as a whole.

Prometheus raises them from series of many nodes, or because a series is missing. Like those of runbooks they are shown
by ``opsd runbook show NAME`` and at ``/runbooks/NAME`` of any agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opsd.runbooks.base import Guide

NOTHING = "\n## What opsd does by itself\nNothing, in every mode: observe, recommend and act. A person has to act.\n"

GUIDES: Final[Mapping[str, Guide]] = {
    "goodput_burn": Guide.parse("""
# A run makes too little progress

## Meaning
Goodput is below the run's objective, over a short and a long window. Goodput is the number of new steps times the usual
step time, divided by the elapsed time; steps repeated after a failure are not new. The label `window` is the longer
window and the urgency: 1h is a page, 6h is for today, 3d is for this week.

## Impact
GPU-hours are lost. At 14.4 times the budget, a month's error budget is used up in two days.

## Diagnosis
1. The job board: is the run down, does it restart repeatedly, or is it slow?
2. `opsd incidents` on its nodes: root causes with their symptoms, and the cost of each.
3. `opsd ledger RUN_DIR`: which bucket grows: recomputed, restart, checkpoint_stall, data_stall?
4. `opsd diagnose` while it is slow: data, network or kernels.

## Mitigation
- Restarts: follow the runbook of the incident that keeps coming back.
- Recomputed steps: save more often, or find out why checkpoints are rejected (`opsd checkpoint list FOLDER`).
- Slow steps: `opsd runbook show throughput_drop`.

## What opsd does by itself
- observe, recommend: only what it does about the incidents that are the cause.
- act: the actions in the runbooks of those incidents.
"""),
    "run_unsupervised": Guide.parse(
        """
# A run has lost its launcher

## Meaning
`run.json` says that the run is active, but the `opsd launch` process that wrote it no longer exists.

## Impact
Ranks may still train, but nothing detects hangs or restarts ranks, and SIGTERM does not trigger a checkpoint.

## Diagnosis
1. `opsd status`: are ranks of the run alive?
2. `journalctl -k --grep "Killed process"`: did the kernel kill the launcher for lack of memory?
3. `sacct -j JOB --format=JobID,State,ExitCode`: did Slurm end the step?

## Mitigation
- Ranks alive: wait for the next checkpoint (`opsd checkpoint list FOLDER`), then end and restart the job.
- Ranks dead: `scontrol requeue JOB`.
"""
        + NOTHING
    ),
    "agent_silent": Guide.parse(
        """
# An agent does not answer

## Meaning
Prometheus cannot scrape the agent of a node: the node is off or unreachable, or its agent is down.

## Impact
Nothing is known about the node's GPUs, and its incidents are neither detected nor remedied. Alerts that need its series
do not fire.

## Diagnosis
1. `scontrol show node NODE`: does Slurm reach it?
2. On the node `journalctl -u opsd -n 50`: why did the agent end, or what does it wait for?
3. On the node `opsd status`. If it answers there but not to Prometheus: a firewall, an agent that listens on loopback
   only (`agent.listen`), or TLS or a password that Prometheus is not configured for.

## Mitigation
- The node is gone: `opsd runbook show node_unreachable`.
- The agent is down and systemd does not restart it: `opsd config check` says whether its settings are valid, then start
  it.
"""
        + NOTHING
    ),
    "agent_missing": Guide.parse(
        """
# Prometheus scrapes no agent

## Meaning
The scrape job `opsd` of Prometheus has no targets.

## Impact
No other alert about nodes and runs can fire.

## Diagnosis
1. `cat /etc/prometheus/opsd-targets.json`: is the list of nodes there and not empty?
2. `opsd targets`: does Slurm return the list of nodes?
3. `grep -n opsd /etc/prometheus/prometheus.yml`: is the job named `opsd`? The rules require that name.

## Mitigation
- Write the list again: `opsd targets --out /etc/prometheus/opsd-targets.json`. It keeps the old list if Slurm is down.
"""
        + NOTHING
    ),
    "collector_blind": Guide.parse(
        """
# A collector is blind

## Meaning
A collector of the agent fails each time, or a call in it has not returned.

## Impact
The state of what it watches is unknown. Runbooks that need it open and resolve no incidents.

## Diagnosis
1. `opsd status`: the collector's state and its reason, in one sentence.
2. `opsd agent --once`: the same in a second process; if that works, the source was down only temporarily.
3. `journalctl -u opsd -n 50`: since when.

## Mitigation
- No permission: compare the unit with the one that opsd ships (`cat /etc/systemd/system/opsd.service`).
- A source that this node does not have: disable the collector in the configuration; `opsd config show` lists all
  settings.
- The driver hangs: `opsd runbook show driver_hang`.
"""
        + NOTHING
    ),
    "collector_limited": Guide.parse(
        """
# A collector leaves things out

## Meaning
Users of the node have more runs, ranks or events, or files in their folders, than the agent looks at. Its limits are
shared evenly among users, runs that live come before those that have ended, and users of a GPU before others.

## Impact
Of the users who have most, some runs or ranks are not watched. Nobody else's are affected.

## Diagnosis
1. `opsd status`: what is left out. `opsd_ranks_left_out` has the numbers.
2. `ls -ln /dev/shm/opsd | awk '{print $3}' | sort | uniq -c`: run folders by user id.

## Mitigation
- Folders of finished runs: their user's next `opsd launch` removes them after a day, or remove them by hand.
- On purpose: talk to the user.
"""
        + NOTHING
    ),
    "agent_slow": Guide.parse(
        """
# An agent misses ticks

## Meaning
Ticks of the agent's loop take longer than their interval, so that some are skipped.

## Impact
Incidents are detected later than they should be.

## Diagnosis
1. `opsd status`: which collector takes long?
2. `opsd top`: is the node short of CPU time?
3. `cat /proc/pressure/cpu`: the percentage of time in which tasks waited for a CPU. Kernels without pressure stall
   information lack the file.

## Mitigation
- A slow collector: give it a longer `interval_s`.
- A node that is short of CPU time: reserve a core for the system (`CoreSpecCount` in slurm.conf).
"""
        + NOTHING
    ),
    "prolog_blind": Guide.parse(
        """
# Slurm's prolog cannot check a node

## Meaning
The last prolog of the node came to no verdict, and its job was started unchecked. On many nodes at once it is the
installation that is broken; a node is never drained for that.

## Impact
A node with a fault takes jobs.

## Diagnosis
1. On the node `journalctl -t opsd -n 20`: why could the preflight not tell?
2. On the node `opsd preflight --profile quick`: the checks that could not run, and what they need.

## Mitigation
- opsd is broken or half installed: install it again.
- A check that this site cannot run: name it in `preflight.optional`.
- The checks take too long: see which one, and leave it to `opsd preflight --profile standard` with `preflight.skip`.
"""
        + NOTHING
    ),
    "journal_down": Guide.parse(
        """
# The journal of a node cannot be written

## Meaning
The agent cannot write its SQLite journal. Records wait in memory.

## Impact
The agent takes no action on the node, because nothing would remember it; notifications go out. If it restarts now, it
loses the incidents since then.

## Diagnosis
1. `opsd status`: the problem in one sentence.
2. `df -h /var/lib/opsd`: is the disk full?
3. `findmnt -T /var/lib/opsd -o TARGET,OPTIONS`: has it become read-only?

## Mitigation
- Make room, or mount it writable again. The agent then writes everything that waits, without a restart.
"""
        + NOTHING
    ),
    "config_refused": Guide.parse(
        """
# A node has refused its configuration

## Meaning
The agent was told to reload its configuration (SIGHUP, `systemctl reload opsd`), and the file, or one that it names, is
wrong. Nothing of it was applied.

## Impact
The agent goes on with the settings that it had. If it starts again, it ends at once with the same sentence.

## Diagnosis
1. `opsd config check`: what is wrong, in one sentence.
2. `opsd status --json`: `config.problem` has what the agent said.
3. `journalctl -u opsd | grep refused`: since when.

## Mitigation
- Correct the file, then `opsd config reload`.
"""
        + NOTHING
    ),
    "agent_crowded": Guide.parse(
        """
# Somebody crowds the HTTP server of a node

## Meaning
The agent closes connections or refuses requests, more than one a second: of clients that are slow (`slow`), of a user
or an address with more than its share of connections (`share`), of too many in total (`full`), with wrong passwords
(`password`), or that do not speak HTTP (`malformed`).

## Impact
Scrapes of others still succeed: each user of the node and each address has a share. It costs CPU time of the node, and
may be an attempt to blind the agent or to guess a password.

## Diagnosis
1. `ss -tnp 'sport = :9477'` on the node: who is connected. Users of the node are shown with their process.
2. The label `reason`: `password` is a client with an old password, or somebody who guesses.

## Mitigation
- Correct or stop the client. A firewall keeps strangers from the port; on loopback, talk to the user.
"""
        + NOTHING
    ),
    "runbook_failing": Guide.parse(
        """
# A runbook raises errors

## Meaning
A function of a runbook raised an exception: a bug in opsd, or unexpected input.

## Impact
This kind of incident may go unnoticed on that node. All others are detected as usual.

## Diagnosis
1. `journalctl -u opsd --grep "runbook"`: the exception and where it was raised.
2. `opsd metrics --list`: which series it reads, and whether one of them has invalid values.

## Mitigation
- Watch for this kind yourself (`opsd runbook show KIND`), and report the exception.
"""
        + NOTHING
    ),
    "exporter_doubtful": Guide.parse(
        """
# What DCGM says is doubtful

## Meaning
A user who is not believed listens where dcgm-exporter or the DCGM host engine should, or DCGM and the driver tell
different things: a GPU that the driver does not know, another index, other numbers of remapped rows for two minutes.

## Impact
None on the driver's values, which count where both tell something. What only DCGM has, such as `DCGM_FI_PROF_*`, may be
missing or wrong. The agent changes no hardware and drains no node on DCGM's word.

## Diagnosis
1. `opsd status`: the line of the collector `dcgm` says which of the two it is, and of what.
2. `ss -ltnpe sport = :9400 or sport = :5555`: which process listens, and whose it is.
3. `nvidia-smi -L` beside `curl -s localhost:9400/metrics | grep GPU_TEMP`: are these the same GPUs?

## Mitigation
- A user's process: end it, and ask the user why. An exporter that runs as a user of its own: name it in `dcgm.users`.
- Other GPUs or indexes: give the exporter all GPUs of the node; restart it after GPUs were replaced.
"""
        + NOTHING
    ),
    "kernel_log_lost": Guide.parse(
        """
# Kernel messages were missed

## Meaning
The kernel wrote messages faster than the agent read them, or more than its buffer holds.

## Impact
An Xid may be among the lost messages. The driver's own event queue usually still reports it.

## Diagnosis
1. `journalctl -k -n 200`: which messages flood the log?
2. `opsd status`: does the collector `kmsg` keep up now?

## Mitigation
- Stop the source of the messages. A larger buffer (`log_buf_len=4M` on the kernel's command line) absorbs bursts.
"""
        + NOTHING
    ),
    "rank_pages_broken": Guide.parse(
        """
# Rank pages cannot be read

## Meaning
Rank pages of a run are damaged, incomplete, or from an incompatible release of opsd.

## Impact
These ranks are not watched: hangs and stragglers among them go unnoticed.

## Diagnosis
1. `opsd status`: which ranks of the run are seen?
2. `ls -l /dev/shm/opsd/RUN`: pages of size 0 mean that shared memory is full (`df -h /dev/shm`).
3. `opsd --version` on the node and in the environment of the job: are they the same?

## Mitigation
- Make room in shared memory, or install the same release in both places and restart the job at its next checkpoint.
"""
        + NOTHING
    ),
    "slurm_silent": Guide.parse(
        """
# Slurm does not answer

## Meaning
The agent's requests to Slurm have failed for five minutes.

## Impact
The agent does not know node states and jobs, and cannot drain or requeue. Running jobs continue.

## Diagnosis
1. `opsd slurm check`: which Slurm this is, and what fails, in one sentence.
2. `scontrol ping`: does the controller answer at all?
3. `journalctl -u slurmctld -n 50` on the controller; `journalctl -u munge -n 20` on the node.

## Mitigation
- One node only: fix its munge or its network. All nodes: fix the controller.
"""
        + NOTHING
    ),
    "spare_pool_empty": Guide.parse(
        """
# No spare is ready

## Meaning
For five minutes none of the cluster's spares was both ready and free of ranks. They have replaced failed nodes, or
their data, software or preflight is missing, outdated or failed.

## Impact
None now. The next node that fails costs its job a requeue, or the time until the node is repaired.

## Diagnosis
1. `opsd spare list`: each spare, and why it is not ready.
2. On the spare: `opsd spare verify` says in one sentence each what is wrong with data, software or preflight.
3. `sinfo -R`: drained nodes that could return; `opsd return --dry-run NODE` says what prevents it.

## Mitigation
- Stale or damaged data: `opsd spare stage`, then `opsd spare verify`, on the spare.
- Software differs: install the other nodes' version. Preflight failed or old: `opsd preflight --profile spare`.
- All in use: repair and return the nodes that they replace, or reserve more: `opsd spare reserve --nodes 2`.
"""
        + NOTHING
    ),
    "incident_escalated": Guide.parse(
        """
# An incident waits for a person

## Meaning
The permitted actions did not resolve an incident, or there are none.

## Impact
That of the incident itself; its cost is shown with it.

## Diagnosis
1. `opsd incidents`: those in state escalated.
2. `opsd incidents show ID`: evidence, culprit, what was tried, and what helped in similar incidents.

## Mitigation
- Follow the incident's runbook: `opsd runbook show KIND`. It is resolved automatically once its cause is gone.
"""
        + NOTHING
    ),
    "action_failed": Guide.parse(
        """
# An action failed

## Meaning
An action of the agent against an incident failed.

## Impact
The incident stays open. The agent retries as often as the runbook allows, then escalates.

## Diagnosis
1. `opsd incidents`: the incident whose action failed.
2. `opsd incidents show ID`: the action and the reason in one sentence.

## Mitigation
- No permission: compare the unit with the one that opsd ships (`cat /etc/systemd/system/opsd.service`).
- Otherwise follow the mitigation in the incident's runbook by hand: `opsd runbook show KIND`.
"""
        + NOTHING
    ),
}
"""Guides by name: the alert's name in snake case."""
