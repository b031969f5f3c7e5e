"""Pages of the alerts that no agent can raise as an incident: about opsd itself, and about a run as a whole.

Prometheus raises them from series of many nodes, or because a series is missing. Their pages have the form of a
runbook's, and are found where those are: ``opsd runbook show NAME`` and ``/runbooks/NAME`` of any agent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opsd.runbooks.base import Guide

NOTHING = (
    "\n## What opsd does by itself\nNothing, in every mode: observe, recommend and act. This one is for a person.\n"
)

GUIDES: Final[Mapping[str, Guide]] = {
    "goodput_burn": Guide.parse("""
# A run makes too little progress

## Meaning
The run's new steps, at its usual step time, fill less of the wall clock than its objective allows, over a short and
a long window. Steps done again after a failure are not new. The label `window` is the longer of the two: 1h is a
page, 6h is for today, 3d is for this week.

## Impact
GPU hours are being paid for that bring no training. At 14.4 times the budget a month's allowance is gone in two days.

## Diagnosis
1. The job board: is the run down, does it restart again and again, or is it slow?
2. `opsd incidents` on its nodes: causes come before symptoms, with what each costs.
3. `opsd ledger RUN_DIR`: which bucket grows: recomputed, restart, checkpoint_stall, data_stall?
4. `opsd diagnose` while it is slow: data, network or kernels.

## Mitigation
- Restarts: the runbook of the incident that keeps coming back.
- Recomputed steps: save more often, or find out why checkpoints are rejected (`opsd checkpoint list FOLDER`).
- Slow steps: `opsd runbook show throughput_drop`.

## What opsd does by itself
- observe, recommend: nothing beyond the incidents that are the cause.
- act: what the runbooks of those incidents say.
"""),
    "run_unsupervised": Guide.parse(
        """
# A run has lost its launcher

## Meaning
`run.json` says that the run goes on, and the process of `opsd launch` that wrote it no longer exists.

## Impact
Ranks may still train, but nobody notices hangs, nobody restarts them, and SIGTERM leads to no checkpoint.

## Diagnosis
1. `opsd status`: are ranks of the run alive?
2. `journalctl -k --grep "Killed process"`: did the kernel kill the launcher for memory?
3. `sacct -j JOB --format=JobID,State,ExitCode`: did Slurm end the step?

## Mitigation
- Ranks alive: wait for the next checkpoint (`opsd checkpoint list FOLDER`), then end and start the job again.
- Ranks dead: `scontrol requeue JOB`.
"""
        + NOTHING
    ),
    "agent_silent": Guide.parse(
        """
# An agent does not answer

## Meaning
Prometheus cannot scrape the agent of a node: the node is off, cut off, or its agent is down.

## Impact
Nothing is known of the node's GPUs, and its incidents are neither found nor remedied. Alerts that need its series
are silent.

## Diagnosis
1. `scontrol show node NODE`: does Slurm hear from it?
2. On the node `journalctl -u opsd -n 50`: why did the agent end, or what does it wait for?
3. On the node `opsd status`: it answers there but not here means a firewall, or that it listens on loopback only
   (`agent.listen`), or that TLS or a password was switched on and Prometheus does not know.

## Mitigation
- The node is gone: `opsd runbook show node_unreachable`.
- The agent is down: have systemd start it again, which it otherwise does by itself; `opsd config check` says whether
  its settings are good.
"""
        + NOTHING
    ),
    "agent_missing": Guide.parse(
        """
# Prometheus scrapes no agent

## Meaning
The job `opsd` of Prometheus has no targets at all.

## Impact
Every other alert about nodes and runs is silent, whatever happens.

## Diagnosis
1. `cat /etc/prometheus/opsd-targets.json`: is the list of nodes there and not empty?
2. `opsd targets`: does Slurm tell which nodes there are?
3. `grep -n opsd /etc/prometheus/prometheus.yml`: is the job named `opsd`? The rules ask for that name.

## Mitigation
- Write the list again: `opsd targets --out /etc/prometheus/opsd-targets.json`. It keeps the old list if Slurm is down.
"""
        + NOTHING
    ),
    "collector_blind": Guide.parse(
        """
# A collector is blind

## Meaning
A source of the agent raises an error each time, or a call into it has not returned.

## Impact
What it watches is unknown. Runbooks that need it find nothing, and heal nothing.

## Diagnosis
1. `opsd status`: the collector's state and its reason, in one sentence.
2. `opsd agent --once`: the same from a second process; if that works, the source was down for a while only.
3. `journalctl -u opsd -n 50`: since when.

## Mitigation
- No permission: compare the unit with the one that opsd ships (`cat /etc/systemd/system/opsd.service`).
- A source that this node does not have: switch the collector off in the configuration; `opsd config show` has it all.
- The driver hangs: `opsd runbook show driver_hang`.
"""
        + NOTHING
    ),
    "agent_slow": Guide.parse(
        """
# An agent leaves out ticks

## Meaning
A tick of the agent's loop takes longer than its interval, so that ticks are left out.

## Impact
Incidents are detected later than they should be.

## Diagnosis
1. `opsd status`: which collector takes long?
2. `opsd top`: is the node short of processor time?
3. `cat /proc/pressure/cpu`: the share of the time, in percent, in which tasks waited for a processor. Kernels without
   pressure information lack the file.

## Mitigation
- A collector that is expensive here: give it a longer `interval_s`.
- A node that is short of processors: leave one for the system (`CoreSpecCount` in slurm.conf).
"""
        + NOTHING
    ),
    "journal_down": Guide.parse(
        """
# The journal of a node cannot be written

## Meaning
The agent cannot write its SQLite journal. Records wait in memory.

## Impact
If the agent restarts now, incidents of this time are forgotten, and so is how often something was tried already.

## Diagnosis
1. `opsd status`: the problem in one sentence.
2. `df -h /var/lib/opsd`: is the disk full?
3. `findmnt -T /var/lib/opsd -o TARGET,OPTIONS`: has it become read-only?

## Mitigation
- Make room, or mount it writable again. The agent goes on by itself and loses nothing that still waits.
"""
        + NOTHING
    ),
    "runbook_failing": Guide.parse(
        """
# A runbook raises errors

## Meaning
A function of a runbook raised an exception: a bug in opsd, or input that nobody thought of.

## Impact
This kind of incident may go unnoticed on that node; all others are looked for as usual.

## Diagnosis
1. `journalctl -u opsd --grep "runbook"`: the exception and where it was raised.
2. `opsd metrics --list`: which series it reads, and whether one of them has values that make no sense.

## Mitigation
- Watch for this kind yourself (`opsd runbook show KIND`), and report the exception.
"""
        + NOTHING
    ),
    "kernel_log_lost": Guide.parse(
        """
# Kernel messages were missed

## Meaning
The kernel wrote messages faster than the agent read them, or more than its buffer holds.

## Impact
An Xid may be among what is lost. The driver's own event queue usually still has it.

## Diagnosis
1. `journalctl -k -n 200`: what floods the log?
2. `opsd status`: does the collector `kmsg` keep up now?

## Mitigation
- End the flood at its source. A larger buffer (`log_buf_len=4M` on the kernel's command line) outlasts bursts.
"""
        + NOTHING
    ),
    "rank_pages_broken": Guide.parse(
        """
# Rank pages cannot be read

## Meaning
Files that should be rank pages of a run are damaged, of another release of opsd, or still being made.

## Impact
These ranks are not watched: hangs and stragglers among them go unnoticed.

## Diagnosis
1. `opsd status`: which ranks of the run are seen?
2. `ls -l /dev/shm/opsd/RUN`: pages of size 0 are of a full shared memory (`df -h /dev/shm`).
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
The agent's questions to Slurm have failed for five minutes.

## Impact
Node states and jobs are unknown there, and nothing can be drained or requeued. Running jobs go on.

## Diagnosis
1. `opsd slurm check`: which Slurm this is, and what fails, in one sentence.
2. `scontrol ping`: does the controller answer anybody?
3. `journalctl -u slurmctld -n 50` on the controller; `journalctl -u munge -n 20` on the node.

## Mitigation
- One node only: its munge or its network. All of them: the controller.
"""
        + NOTHING
    ),
    "spare_pool_empty": Guide.parse(
        """
# No spare is ready

## Meaning
The cluster has spares, and for five minutes none of them was both ready and free of ranks: they have taken the place
of nodes that failed, or their data, software or preflight is not known to be good.

## Impact
None now. The next node that fails costs its job a requeue, or the time until the node is repaired.

## Diagnosis
1. `opsd spare list`: each spare, and why it is not ready.
2. On the spare: `opsd spare verify` says what lacks, data, software or preflight, in one sentence each.
3. `sinfo -R`: nodes that are drained and could come back; `opsd return --dry-run NODE` says what stands against it.

## Mitigation
- Stale or damaged data: `opsd spare stage`, then `opsd spare verify`, on the spare.
- Software differs: update it as the other nodes; preflight failed or old: `opsd preflight --profile spare`.
- All in use: repair and return the nodes that they stand in for, or reserve more, `opsd spare reserve --nodes 2`.
"""
        + NOTHING
    ),
    "incident_escalated": Guide.parse(
        """
# An incident waits for a person

## Meaning
opsd has done what it may about an incident and it did not help, or there is nothing that it may do.

## Impact
That of the incident itself; its cost is shown with it.

## Diagnosis
1. `opsd incidents`: the ones in state escalated.
2. `opsd incidents show ID`: evidence, culprit, what was tried, and what helped in incidents like it.

## Mitigation
- Follow the incident's own page: `opsd runbook show KIND`. It closes by itself once its cause is gone.
"""
        + NOTHING
    ),
    "action_failed": Guide.parse(
        """
# An action failed

## Meaning
The agent tried to do something about an incident and could not.

## Impact
The incident goes on. The agent tries again, as often as the runbook allows, and then escalates.

## Diagnosis
1. `opsd incidents`: the incident whose action failed.
2. `opsd incidents show ID`: the action and the reason in one sentence.

## Mitigation
- No permission: compare the unit with the one that opsd ships (`cat /etc/systemd/system/opsd.service`).
- Otherwise do by hand what the page of the incident says: `opsd runbook show KIND`.
"""
        + NOTHING
    ),
}
"""Pages by name: the alert's name in snake case."""
