"""Alerts about the hardware of nodes: GPUs, their links, memory, network.

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
