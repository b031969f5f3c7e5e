"""Alerts about opsd itself: agents and collectors that do not watch, lost records, failed actions."""

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
            description="The node, its network or the agent is down. Nothing is known about its GPUs.",
        ),
        Alert(
            "AgentMissing",
            'absent(up{job="opsd"})',
            scope="cluster",
            severity="critical",
            hold="1m",
            summary="Prometheus scrapes no agent",
            description="The scrape job opsd has no targets. No other alert of opsd can fire.",
        ),
        Alert(
            "CollectorBlind",
            'max by (cluster, instance, collector) (opsd_collector_state{state=~"error|hung"}) == 1',
            severity="warning",
            hold="5m",
            summary="Collector {{ $labels.collector }} of {{ $labels.instance }} is blind",
            description="It fails or hangs. The state of what it watches is unknown.",
        ),
        Alert(
            "CollectorLimited",
            'max by (cluster, instance, collector) (opsd_collector_state{state="limited"}) == 1',
            severity="warning",
            hold="5m",
            summary="Collector {{ $labels.collector }} of {{ $labels.instance }} leaves things out",
            description="A limit on runs, ranks, events or processor time bites. Other users' share is not affected.",
        ),
        Alert(
            "AgentSlow",
            "max by (cluster, instance) (rate(opsd_agent_missed_ticks_total[5m])) > 0.2",
            severity="warning",
            hold="5m",
            summary="The agent of {{ $labels.instance }} misses more than a fifth of its ticks",
            description="Detection is delayed. The node may be short of CPU time.",
        ),
        Alert(
            "JournalDown",
            "max by (cluster, instance) (opsd_journal_up) == 0",
            severity="warning",
            hold="2m",
            summary="The journal of {{ $labels.instance }} cannot be written",
            description="Incidents are kept only in memory, and the agent takes no action: nothing would remember it.",
        ),
        Alert(
            "ConfigRefused",
            "max by (cluster, instance) (opsd_config_last_reload_successful) == 0",
            severity="warning",
            hold="2m",
            summary="{{ $labels.instance }} has refused its configuration",
            description="The agent goes on with the settings that it had. It would not start with the file as it is.",
        ),
        Alert(
            "AgentCrowded",
            'sum by (cluster, instance, reason) (rate(opsd_http_refused_total{reason!="host"}[5m])) > 1',
            severity="warning",
            hold="5m",
            summary="Somebody crowds the HTTP server of {{ $labels.instance }} ({{ $labels.reason }})",
            description="Each user and each address has a share, so scrapes still succeed. It costs the node CPU time.",
        ),
        Alert(
            "PrologBlind",
            'max by (cluster, instance) (opsd_prolog_verdict{verdict="unknown"}) == 1',
            severity="warning",
            summary="The prolog could not check {{ $labels.instance }}",
            description="Jobs start there unchecked; the system log says why.",
        ),
        Alert(
            "RunbookFailing",
            "sum by (cluster, instance, kind) (increase(opsd_runbook_errors_total[10m])) > 0",
            severity="warning",
            summary="Runbook {{ $labels.kind }} raises errors on {{ $labels.instance }}",
            description="Incidents of this kind may go unnoticed on this node.",
        ),
        Alert(
            "KernelLogLost",
            "sum by (cluster, instance) (increase(opsd_kmsg_dropped_total[10m])) > 0",
            severity="info",
            summary="The agent of {{ $labels.instance }} has missed kernel messages",
            description="The kernel wrote faster than the agent read. An Xid may be among the lost messages.",
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
        ),
        Alert(
            "RankPagesBroken",
            "max by (cluster, instance, run) (opsd_rank_page_errors) > 0",
            severity="warning",
            hold="2m",
            summary="Rank pages of run {{ $labels.run }} on {{ $labels.instance }} cannot be read",
            description="These ranks are not watched. Hangs and stragglers among them go unnoticed.",
        ),
        Alert(
            "SlurmSilent",
            "max by (cluster, instance) (opsd_slurm_up) == 0",
            severity="warning",
            hold="5m",
            summary="Slurm does not answer {{ $labels.instance }}",
            description="The agent there does not know jobs and node states, and cannot drain or requeue.",
        ),
        Alert(
            "IncidentEscalated",
            'sum by (cluster, instance, kind, severity) (opsd_incidents{state="escalated"}) > 0',
            summary="Incident {{ $labels.kind }} on {{ $labels.instance }} waits for a person",
            description="opsd has no remedy, is not allowed to apply it, or has used up its attempts.",
        ),
        Alert(
            "ActionFailed",
            'sum by (cluster, instance, verb) (increase(opsd_actions_total{outcome="failed"}[10m])) > 0',
            severity="warning",
            summary="Action {{ $labels.verb }} failed on {{ $labels.instance }}",
            description="The agent tried to remedy an incident and failed.",
        ),
    ),
)
