"""Alerts about the hardware of nodes: GPUs, their links, memory, network, storage.

An alert uses the series where they show the fault directly, and the agent's incident where the node's history or logs
are needed to decide.
"""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, RecordingRule, incident, manual

_XIDS_OF_PROGRAMS = "13|14|31|37|38|43|44|45|63|66|67|92|94|106|107|108|137|141|154|157"
"""Xids that NVIDIA's catalogue says to ignore, that follow other Xids, or that programs can cause. For the last, the
agent looks at the program and opens an incident if the GPU was the cause."""

_XIDS = (
    f'sum by (cluster, instance, pci_bus_id, code) (increase(opsd_xid_total{{code!~"{_XIDS_OF_PROGRAMS}"}}[15m])) > 0'
)

THROTTLES = "sw_thermal|hw_thermal|hw_slowdown|hw_power_brake"
"""Throttle reasons that count. The software power cap does not: near 700 W it is normal."""

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
The node was out of service for faults more often in 30 days than chance explains (false discovery rate 10 %), and this
cluster's own history shows that nodes which failed most go on to. Where it does not, no node is called a lemon.

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
            "RepairStuck",
            "max by (cluster, instance) (opsd_repair_age_seconds) > 21600\n  "
            "unless on (cluster, instance) max by (cluster, instance) (opsd_slurm_jobs) > 0",
            severity="warning",
            hold="30m",
            summary="The repair of {{ $labels.instance }} has taken {{ $value | humanizeDuration }}",
            description="No job is on the node any more, and it is neither returned nor given up.",
            guide=manual("""
# A repair takes too long

## Meaning
A repair of the node was ordered, or its first remedy began, more than six hours ago. It has not ended, though no job
has been on the node for half an hour.

## Impact
The cluster has one node less, which counts against `policy.max_drained_share`.

## Diagnosis
1. On the node `opsd repair`: what was tried, and what it waits for.
2. `systemctl status opsd-repair.path opsd-repair.service`: an order that nobody takes up means that the path unit is
   not enabled.
3. `journalctl -u opsd-repair -n 50`: what failed, and whether Slurm answers.

## Mitigation
- It was ordered and nobody has begun: `systemctl enable --now opsd-repair.path`.
- It waits for the end of a maintenance (`policy.maintenance`): nothing is wrong.
- A retest takes so long by itself (`policy.return_profile`): raise the limit in a rule of your own.
- It will not end: `scontrol update nodename=NODE state=drain reason="mine"` takes the node over; opsd then leaves it.
"""),
        ),
        Alert(
            "GpuLost",
            "max by (cluster, instance, gpu) (opsd_gpu_up) == 0",
            scope="gpu",
            severity="critical",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} is lost",
            description="The driver no longer reaches the GPU. Jobs on it hang or crash until the node is reset.",
        ),
        Alert(
            "DriverHang",
            'max by (cluster, instance) (opsd_collector_state{collector="nvml", state="hung"}) == 1',
            severity="critical",
            hold="15s",
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

HARDWARE = Group(
    "hardware",
    (
        RecordingRule(
            "instance_gpu:opsd_gpu_throttle:ratio_rate1m",
            f'clamp_max(max by (cluster, instance, gpu) (rate(opsd_gpu_throttle_seconds_total{{reason=~"{THROTTLES}"}}'
            "[1m])), 1)",
        ),
        Alert(
            "GpuThrottle",
            "instance_gpu:opsd_gpu_throttle:ratio_rate1m > 0.1",
            scope="gpu",
            severity="critical",
            keep="1m",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} is throttled "
            "{{ $value | humanizePercentage }} of the time",
            description="Heat, power brake or hardware slowdown lower its clocks. The power cap is not counted.",
        ),
        Alert(
            "GpuXid",
            f"({_XIDS})\n  * on (cluster, instance, pci_bus_id) group_left (gpu) opsd_gpu_info\n"
            f"or on (cluster, instance, pci_bus_id)\n  {_XIDS}\n"
            f"or on (cluster, instance)\n  {incident('gpu_xid')}",
            scope="gpu",
            severity="critical",
            summary="Xid {{ $labels.code }} on {{ $labels.instance }}{{ with $labels.gpu }}, GPU {{ . }}{{ end }}",
            description="The driver reported a fault that programs cannot cause, or that according to the agent "
            "was not caused by this program.",
        ),
        Alert(
            "GpuEcc",
            """
sum by (cluster, instance, gpu) (increase(opsd_gpu_ecc_errors_total{type="uncorrected", counter="volatile"}[15m])) > 0
  or
sum by (cluster, instance, gpu) (increase(opsd_gpu_ecc_errors_total{type="corrected", counter="volatile"}[1m])) >= 100
""",
            scope="gpu",
            severity="critical",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} has memory errors",
            description="Uncorrected ECC errors, or a burst of corrected ones. Jobs may crash or give wrong results.",
        ),
        Alert(
            "GpuRowRemap",
            "max by (cluster, instance, gpu) (opsd_gpu_row_remap_pending) == 1\n  or\n"
            "max by (cluster, instance, gpu) (DCGM_FI_DEV_ROW_REMAP_FAILURE) == 1",
            scope="gpu",
            severity="warning",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} has a pending or failed row remap",
            description="A pending remap takes effect at the next GPU reset. After a failed one replace the GPU.",
        ),
        Alert(
            "NvlinkErrors",
            """
sum by (cluster, instance, gpu) (increase(opsd_gpu_nvlink_errors_total{type="recovery"}[5m])) > 0
  or
sum by (cluster, instance, gpu) (increase(opsd_gpu_nvlink_errors_total{type=~"replay|crc_data"}[1m])) >= 30
  or
count by (cluster, instance, gpu) (opsd_gpu_nvlink_up == 0) > 0
""",
            scope="gpu",
            severity="warning",
            hold="1m",
            summary="NVLink of GPU {{ $labels.gpu }} of {{ $labels.instance }} has errors or is down",
            description="Fires after one minute, as links go up and down while a node boots.",
        ),
        Alert(
            "FabricManager",
            "max by (cluster, instance, gpu) ((opsd_gpu_fabric_state > 0) < 3)\n  or\n"
            "max by (cluster, instance, gpu) (opsd_gpu_fabric_problem) == 1",
            scope="gpu",
            severity="warning",
            hold="2m",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} is not registered with its NVLink fabric",
            description="Without the fabric manager a job on this GPU does not start, or uses slow paths.",
        ),
        Alert(
            "ImexNotReady",
            "max by (cluster, instance) (opsd_imex_state) != 5",
            severity="warning",
            hold="5m",
            summary="The IMEX daemon of {{ $labels.instance }} is not ready",
            description="Its GPUs share no memory over NVLink with those of other nodes.",
            guide=manual("""
# The IMEX daemon is not ready

## Meaning
For five minutes `nvidia-imex-ctl -q` has printed another state than READY on this node. The daemon lets GPUs of
different nodes use each other's memory over NVLink, as in an NVL72 rack. A daemon that gives no answer has no series
and no alert.

## Impact
A segment (TP or EP group) that spans this node and others does not start, or leaves NVLink for the network. Ranks that
stay within the node are not affected. The alert names the job on the node.

## Diagnosis
1. `nvidia-imex-ctl -q`: WAITING_FOR_PEERS and WAITING_FOR_RECOVERY mean that the daemons of other nodes are missing,
   UNAVAILABLE that this one has failed. After an unclean end the daemon waits for each node that had used its memory.
2. `nvidia-imex-ctl -N`: which nodes of the domain are connected, and which have another version.
3. `journalctl -u nvidia-imex -n 50`: driver and daemon of different versions, a port that is closed, or addresses in
   `/etc/nvidia-imex/nodes_config.cfg` that differ between the nodes.

## Mitigation
- A node of the domain is down: repair it; or, when no job uses the domain, take it out of `nodes_config.cfg` on all
  nodes and restart their daemons.
- The files differ: write the same one to all nodes of the domain.
- The daemon has failed: `systemctl restart nvidia-imex` when no job is on the node; memory shared with others is lost.
- Until then: `opsd drain NODE --reason WHY` if segments are to span nodes.
"""),
        ),
        Alert(
            "PcieDegraded",
            "max by (cluster, instance, gpu) (opsd_gpu_pcie_link_width < opsd_gpu_pcie_link_width_max)\n  or\n"
            "max by (cluster, instance, gpu) (rate(DCGM_FI_DEV_PCIE_REPLAY_COUNTER[5m])) > 1",
            scope="gpu",
            severity="warning",
            hold="2m",
            summary="The PCIe link of GPU {{ $labels.gpu }} of {{ $labels.instance }} is degraded",
            description="It runs with fewer lanes than the hardware supports, or resends packets.",
        ),
        Alert(
            "FanFailing",
            incident("fan_failing"),
            summary="Cooling of {{ $labels.instance }} is failing",
            description="At the same power, GPUs run hotter than their neighbours and than before.",
        ),
        Alert(
            "ZombieGpuProcess",
            incident("zombie_gpu_process"),
            summary="A process holds a GPU of {{ $labels.instance }} that should be free",
            description="The next job on this GPU finds too little memory, or shares the GPU unknowingly.",
        ),
        Alert(
            "HostMemory",
            "max by (cluster, instance) (opsd_host_memory_available_bytes / opsd_host_memory_total_bytes) < 0.03",
            severity="critical",
            hold="30s",
            summary="{{ $labels.instance }} has {{ $value | humanizePercentage }} of its memory left",
            description="The kernel is about to kill processes, and ranks are the largest.",
        ),
        Alert(
            "ClockSkew",
            incident("clock_skew"),
            summary="The clock of {{ $labels.instance }} was stepped",
            description="Timestamps in logs and checkpoints of this node cannot be compared with those of other nodes.",
        ),
    ),
    interval="5s",
)

NETWORK = Group(
    "network",
    (
        Alert(
            "IbLink",
            incident("ib_link"),
            summary="A network link of {{ $labels.instance }} is down, slow or flapping",
            description="NCCL continues with fewer links, or waits for this one until it times out.",
        ),
        Alert(
            "NicDegrading",
            incident("nic_degrading"),
            summary="A network port of {{ $labels.instance }} has errors",
            description="A cable or an adapter is failing. Collectives become slow before the link goes down.",
        ),
    ),
)

_SHARED = "opsd_storage_reachable"
"""Only network file systems have this series."""
_WRITABLE = "unless on (cluster, instance, mount) opsd_storage_read_only == 1"


def _full(scope: str, which: str) -> str:
    """File systems that are nearly full by the runbook's rule: small share free, and few GiB or inodes free."""
    on_mount = f"on ({scope}, mount)"
    counted = f"max by ({scope}, mount) (\n  ({{}})\n  {which}\n  {_WRITABLE}\n)"
    share = counted.format(
        "opsd_host_filesystem_available_bytes / opsd_host_filesystem_size_bytes or "
        "opsd_storage_available_bytes / opsd_storage_size_bytes"
    )
    left = counted.format("opsd_host_filesystem_available_bytes or opsd_storage_available_bytes")
    inodes = counted.format(
        "opsd_host_filesystem_inodes_free / opsd_host_filesystem_inodes or "
        "opsd_storage_inodes_free / opsd_storage_inodes"
    )
    return f"{share} < 0.05\nand {on_mount}\n{left} < 100 * 2 ^ 30\nor\n{inodes} < 0.05"


STORAGE = Group(
    "storage",
    (
        Alert(
            "StorageFull",
            _full("cluster, instance", f"unless on (cluster, instance, mount) {_SHARED}"),
            severity="warning",
            hold="1m",
            summary="{{ $labels.mount }} of {{ $labels.instance }} has {{ $value | humanizePercentage }} left",
            description="The next checkpoint may not fit. If it is shared memory, data loaders crash.",
        ),
        Alert(
            "StorageFull",
            _full("cluster", f"and on (cluster, instance, mount) {_SHARED}"),
            scope="cluster",
            severity="critical",
            hold="1m",
            summary="{{ $labels.mount }} has {{ $value | humanizePercentage }} left",
            description="A network file system; one alert for all its nodes. The next checkpoint may not fit.",
            cost="Every run that writes there will lose its checkpoints.",
        ),
        Alert(
            "StorageSlow",
            incident("storage_slow"),
            summary="Storage of {{ $labels.instance }} is slow",
            description="A disk or a file system responds far more slowly than before.",
        ),
    ),
)
