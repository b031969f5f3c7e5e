"""Alerts about the hardware of nodes: GPUs, their links, memory, network.

The agent judges, and an alert is a view of its incident. Only what no agent can say has an expression of its own.
"""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group, RecordingRule, incident, manual

THROTTLES = "sw_thermal|hw_thermal|hw_slowdown|hw_power_brake"
"""Throttle reasons that count. The software power cap does not: near 700 W it is normal."""

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
            incident("gpu_throttle"),
            scope="gpu",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} is throttled",
            description="Heat, power brake or hardware slowdown lower its clocks. The power cap is not counted.",
        ),
        Alert(
            "GpuXid",
            incident("gpu_xid"),
            scope="gpu",
            summary="The driver of {{ $labels.instance }} reports an Xid{{ with $labels.gpu }} of GPU {{ . }}{{ end }}",
            description="The incident says what it calls for, and whether the program or the GPU is to blame.",
        ),
        Alert(
            "GpuEcc",
            incident("gpu_ecc"),
            scope="gpu",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} has memory errors",
            description="Uncorrected ECC errors, or a burst of corrected ones. Jobs may crash or give wrong results.",
        ),
        Alert(
            "GpuRowRemap",
            incident("gpu_row_remap"),
            scope="gpu",
            summary="GPU {{ $labels.gpu }} of {{ $labels.instance }} has a pending or failed row remap",
            description="A pending remap takes effect at the next GPU reset. After a failed one replace the GPU.",
        ),
        Alert(
            "NvlinkErrors",
            incident("nvlink_errors"),
            scope="gpu",
            summary="NVLink of GPU {{ $labels.gpu }} of {{ $labels.instance }} has errors or is down",
            description="Links that fail make collectives slow or stop them; the job waits for this GPU.",
        ),
        Alert(
            "FabricManager",
            incident("fabric_manager"),
            scope="gpu",
            summary="The NVLink fabric of {{ $labels.instance }} is not well",
            description="Jobs that use NVLink there do not start, hang, or use slow paths.",
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
            incident("pcie_degraded"),
            scope="gpu",
            summary="The PCIe link of GPU {{ $labels.gpu }} of {{ $labels.instance }} is degraded",
            description="It runs with fewer lanes or more slowly than the hardware supports, or resends packets.",
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
            incident("host_memory"),
            summary="{{ $labels.instance }} has hardly any memory left",
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
