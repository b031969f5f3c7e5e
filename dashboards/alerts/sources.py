"""Alerts about what the agent reads: collectors that fail or leave things out, lost or doubtful records."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, manual

SOURCES = (
    Alert(
        "CollectorBlind",
        'max by (cluster, instance, collector) (opsd_collector_state{state=~"error|hung"}) == 1',
        severity="warning",
        hold="5m",
        summary="Collector {{ $labels.collector }} of {{ $labels.instance }} is blind",
        description="It fails or hangs. The state of what it watches is unknown.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "CollectorLimited",
        'max by (cluster, instance, collector) (opsd_collector_state{state="limited"}) == 1',
        severity="warning",
        hold="5m",
        summary="Collector {{ $labels.collector }} of {{ $labels.instance }} leaves things out",
        description="A limit on runs, ranks, events or processor time bites. Other users' share is not affected.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "PrologBlind",
        'max by (cluster, instance) (opsd_prolog_verdict{verdict="unknown"}) == 1',
        severity="warning",
        summary="The prolog could not check {{ $labels.instance }}",
        description="Jobs start there unchecked; the system log says why.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "KernelLogLost",
        "sum by (cluster, instance) (increase(opsd_kmsg_dropped_total[10m])) > 0",
        severity="info",
        summary="The agent of {{ $labels.instance }} has missed kernel messages",
        description="The kernel wrote faster than the agent read. An Xid may be among the lost messages.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "ExporterDoubtful",
        "(max by (cluster, instance) (opsd_dcgm_untrusted) == 1) or "
        "(max by (cluster, instance) (opsd_dcgm_disagreements) > 0)",
        severity="info",
        hold="10m",
        summary="What DCGM says on {{ $labels.instance }} is doubtful",
        description="A user who is not believed listens on its port, or it disagrees with the driver. The driver's "
        "values count.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "RankPagesBroken",
        "max by (cluster, instance, run) (opsd_rank_page_errors) > 0",
        severity="warning",
        hold="2m",
        summary="Rank pages of run {{ $labels.run }} on {{ $labels.instance }} cannot be read",
        description="These ranks are not watched. Hangs and stragglers among them go unnoticed.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "SlurmSilent",
        "max by (cluster, instance) (opsd_slurm_up) == 0",
        severity="warning",
        hold="5m",
        summary="Slurm does not answer {{ $labels.instance }}",
        description="The agent there does not know jobs and node states, and cannot drain or requeue.",
        guide=manual("""
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
"""),
    ),
)
