"""Alerts about nodes that are out of service, and about the spares that would replace them."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, incident, manual

AVAILABILITY = Group(
    "availability",
    (
        Alert(
            "NodeUnreachable",
            incident("node_unreachable"),
            summary="Node unreachable, seen from {{ $labels.instance }}",
            description="Slurm or a run has lost contact with this node, or with a node that it works with.",
        ),
        Alert(
            "SparePoolEmpty",
            "count by (cluster) (opsd_spare_ready) unless on (cluster) sum by (cluster) "
            "(opsd_spare_ready unless on (cluster, instance) opsd_rank_up == 1) > 0",
            scope="cluster",
            severity="warning",
            hold="5m",
            summary="No spare of the cluster is ready",
            description="All spares are in use, outdated or failed. The next node failure costs a requeue.",
            cost="The next node failure stops its job until the node is repaired or the job is requeued.",
            guide=manual("""
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
"""),
        ),
        Alert(
            "NodeToReplace",
            'max by (cluster, instance) (opsd_repair_state{state="rma"}) == 1\n  '
            'unless on (cluster, instance) max by (cluster, instance) (opsd_slurm_node_flag{flag="drain"}) == 0',
            severity="warning",
            hold="5m",
            summary="{{ $labels.instance }} could not be repaired and has to be replaced",
            description="The node stays drained. The reason in Slurm names the archive for its vendor.",
            guide=manual("""
# A node has to be replaced

## Meaning
Repairs of the node have not helped or not lasted, and opsd keeps it out of service with the reason `opsd:rma`.

## Impact
The cluster has one node less. No job runs on it.

## Diagnosis
1. `sinfo -R`: the reason says what failed last, and where on the node the archive of evidence is.
2. On the node `opsd evidence` makes a newer archive.

## Mitigation
- Send the archive to the vendor; names of users and jobs are in it.
- Once the hardware was replaced: `opsd preflight --profile standard` on the node, then `opsd return NODE`.
  The alert ends when Slurm has the node back.
"""),
        ),
        Alert(
            "LemonNode",
            "max by (cluster, instance) (opsd_node_lemon) == 1",
            severity="warning",
            hold="5m",
            summary="{{ $labels.instance }} fails again and again",
            description="It had more faults in 30 days than chance explains, and such nodes go on failing here.",
            guide=manual("""
# A node fails again and again

## Meaning
The node was out of service for faults, or jobs failed on it and ran without it, more often in 30 days than chance
explains (false discovery rate 10 %), and this cluster's own history shows that nodes which failed most go on to. Where
it does not, no node is called a lemon. Jobs count where `opsd_node_failed_jobs_counted` is 1: an agent with
`policy.drain` could read Slurm's accounting and write the comments of nodes.

## Impact
Jobs on it are interrupted more often. `opsd nodes pick` avoids it, and it is fetched as a spare if no other is free.

## Diagnosis
1. `opsd nodes lemons`: its faults, how many of them soon after a repair, and how sure that is.
2. `scontrol show node NODE`: the comment has kinds and times. The same kind each time points at one part.
3. `opsd incidents` on the node: which GPU, link or disk it was.

## Mitigation
- Propose its replacement to the vendor: `opsd evidence` on the node makes the archive for that.
- Until then: `opsd drain NODE --reason WHY`, or leave it for short jobs.
- Once the part was replaced, the alert ends as the faults grow older than 30 days.
"""),
        ),
        Alert(
            "RepairLeft",
            'max by (cluster, instance) (opsd_repair_state{state="left"}) == 1\n  '
            'and on (cluster, instance) opsd_slurm_node_reason_info{reason=~"opsd:.*"} == 1',
            severity="warning",
            hold="30m",
            summary="{{ $labels.instance }} is out of service and was left to people",
            description="opsd could not repair it, nothing says that its hardware is to blame, and nobody holds it.",
            guide=manual("""
# A repair was left to people

## Meaning
A repair of the node has ended for half an hour, neither with its return nor as `opsd:rma`, and opsd's drain is still
there: no remedy could be applied, the test could not be made or has found what is not the node's hardware, or its
return was refused.

## Impact
The cluster has one node less, which counts against `policy.max_drained_share`.

## Diagnosis
1. `journalctl -u 'opsd-repair*' -n 50` on the node: the last line says why.
2. `opsd preflight --profile standard` on it: whether that is still so.

## Mitigation
- See to the cause (RebootProgram in slurm.conf, shared storage, processes that come back, a full disk), then
  `opsd repair --act` on the node, or `opsd return NODE` once it has passed its preflight.
- It stays out for a reason of your own: `scontrol update nodename=NODE state=drain reason="mine"` ends the alert.
"""),
        ),
        Alert(
            "RepairStuck",
            "max by (cluster, instance) (opsd_repair_age_seconds) > 21600\n  "
            "unless on (cluster, instance) max by (cluster, instance) (opsd_slurm_jobs) > 0\n  "
            'unless on (cluster, instance) max by (cluster, instance) (opsd_repair_state{state="paused"}) > 0',
            severity="warning",
            hold="30m",
            summary="The repair of {{ $labels.instance }} has taken {{ $value | humanizeDuration }}",
            description="No job is on the node any more, and it is neither returned nor given up.",
            guide=manual("""
# A repair takes too long

## Meaning
A repair of the node was ordered, its first remedy began, or its last pause ended more than six hours ago. It has not
ended, though no job has been on the node for half an hour. Times and reservations for maintenance pause a repair.

## Impact
The cluster has one node less, which counts against `policy.max_drained_share`.

## Diagnosis
1. On the node `opsd repair`: what was tried, and what it waits for.
2. `systemctl status opsd-repair.path opsd-repair.service`: an order that nobody takes up means that the path unit is
   not enabled.
3. `journalctl -u 'opsd-repair*' -n 50`: what failed, and whether Slurm answers.

## Mitigation
- It was ordered and nobody has begun: `systemctl enable --now opsd-repair.path`.
- A retest takes so long by itself (`policy.return_profile`): raise the limit in a rule of your own.
- It will not end: `scontrol update nodename=NODE state=drain reason="mine"` takes the node over; opsd then leaves it.
"""),
        ),
        Alert(
            "GpuLost",
            incident("gpu_lost"),
            scope="gpu",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} is lost",
            description="The driver no longer reaches the GPU. Jobs on it hang or crash until the node is reset.",
        ),
        Alert(
            "DriverHang",
            incident("driver_hang"),
            summary="The NVIDIA driver of {{ $labels.instance }} hangs",
            description="A call into the driver has not returned. The state of this node's GPUs is unknown.",
        ),
        Alert(
            "RankCrash",
            incident("rank_crash"),
            summary="A rank on {{ $labels.instance }} crashed",
            description="A rank ended before its run was complete.",
        ),
        Alert(
            "RankHang",
            incident("rank_hang"),
            summary="A rank on {{ $labels.instance }} hangs",
            description="A rank has not changed phase or step for much longer than is usual for this run.",
        ),
        Alert(
            "CollectiveHang",
            incident("collective_hang"),
            summary="A collective hangs on {{ $labels.instance }}",
            description="Ranks wait in a collective that does not end. One rank or the network blocks all.",
        ),
    ),
    interval="5s",
)
