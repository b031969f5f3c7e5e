"""Alerts about opsd itself: what does not watch, does not remember or did not help. A silent exporter is an alert."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, Group

ITSELF = Group(
    "itself",
    (
        Alert(
            "AgentSilent",
            'up{job="opsd"} == 0',
            severity="critical",
            hold="30s",
            agent_lives=False,
            summary="The agent of {{ $labels.instance }} does not answer",
            description="The node, its network or the agent is down; nothing is known of its GPUs.",
        ),
        Alert(
            "AgentMissing",
            'absent(up{job="opsd"})',
            scope="cluster",
            severity="critical",
            hold="1m",
            summary="Prometheus scrapes no agent at all",
            description="The job opsd has no targets: every other alert is silent, whatever happens.",
        ),
        Alert(
            "CollectorBlind",
            'max by (cluster, instance, collector) (opsd_collector_state{state=~"error|hung"}) == 1',
            severity="warning",
            hold="5m",
            summary="Collector {{ $labels.collector }} of {{ $labels.instance }} is blind",
            description="It raises or hangs. What it watches is unknown, which is not healthy.",
        ),
        Alert(
            "AgentSlow",
            "max by (cluster, instance) (rate(opsd_agent_missed_ticks_total[5m])) > 0.2",
            severity="warning",
            hold="5m",
            summary="The agent of {{ $labels.instance }} leaves out a fifth of its ticks or more",
            description="Detection is later than it should be; the node may be short of processor time.",
        ),
        Alert(
            "JournalDown",
            "max by (cluster, instance) (opsd_journal_up) == 0",
            severity="warning",
            hold="2m",
            summary="The journal of {{ $labels.instance }} cannot be written",
            description="Incidents are kept in memory only and are forgotten if the agent restarts.",
        ),
        Alert(
            "RunbookFailing",
            "sum by (cluster, instance, kind) (increase(opsd_runbook_errors_total[10m])) > 0",
            severity="warning",
            summary="Runbook {{ $labels.kind }} raises errors on {{ $labels.instance }}",
            description="This kind of incident may go unnoticed there.",
        ),
        Alert(
            "KernelLogLost",
            "sum by (cluster, instance) (increase(opsd_kmsg_dropped_total[10m])) > 0",
            severity="info",
            summary="The agent of {{ $labels.instance }} has missed kernel messages",
            description="The kernel wrote faster than the agent read; an Xid may be among what is lost.",
        ),
        Alert(
            "RankPagesBroken",
            "max by (cluster, instance, run) (opsd_rank_page_errors) > 0",
            severity="warning",
            hold="2m",
            summary="Rank pages of run {{ $labels.run }} on {{ $labels.instance }} cannot be read",
            description="Ranks are not watched: hangs and stragglers among them go unnoticed.",
        ),
        Alert(
            "SlurmSilent",
            "max by (cluster, instance) (opsd_slurm_up) == 0",
            severity="warning",
            hold="5m",
            summary="Slurm does not answer {{ $labels.instance }}",
            description="Jobs and node states are unknown there, and nothing can be drained or requeued.",
        ),
        Alert(
            "IncidentEscalated",
            'sum by (cluster, instance, kind, severity) (opsd_incidents{state="escalated"}) > 0',
            summary="Incident {{ $labels.kind }} on {{ $labels.instance }} waits for a person",
            description="What opsd may do is used up, or is nothing.",
        ),
        Alert(
            "ActionFailed",
            'sum by (cluster, instance, verb) (increase(opsd_actions_total{outcome="failed"}[10m])) > 0',
            severity="warning",
            summary="Action {{ $labels.verb }} failed on {{ $labels.instance }}",
            description="The agent tried to remedy an incident and could not.",
        ),
    ),
)
