"""Alerts about the agent: it does not answer, is slow, loses records, or its runbooks and actions fail."""

from __future__ import annotations

from opsd.dashboards.alerts.model import Alert, manual

AGENT = (
    Alert(
        "AgentSilent",
        'up{job="opsd"} == 0',
        severity="critical",
        hold="30s",
        agent_lives=False,
        summary="The agent of {{ $labels.instance }} does not answer",
        description="The node, its network or the agent is down. Nothing is known about its GPUs.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "AgentMissing",
        'absent(up{job="opsd"})',
        scope="cluster",
        severity="critical",
        hold="1m",
        summary="Prometheus scrapes no agent",
        description="The scrape job opsd has no targets. No other alert of opsd can fire.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "AgentSlow",
        "max by (cluster, instance) (rate(opsd_agent_missed_ticks_total[5m])) > 0.2",
        severity="warning",
        hold="5m",
        summary="The agent of {{ $labels.instance }} misses more than a fifth of its ticks",
        description="Detection is delayed. The node may be short of CPU time.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "AgentCrowded",
        'sum by (cluster, instance, reason) (rate(opsd_http_refused_total{reason!="host"}[5m])) > 1',
        severity="warning",
        hold="5m",
        summary="Somebody crowds the HTTP server of {{ $labels.instance }} ({{ $labels.reason }})",
        description="Each user and each address has a share, so scrapes still succeed. It costs the node CPU time.",
        guide=manual("""
# Somebody crowds the HTTP server of a node

## Meaning
The agent closes connections or refuses requests, more than one a second: of clients that are slow (`slow`), of a user
or an address with more than its share of connections (`share`), of too many in total (`full`), with wrong passwords
(`password`), without a certificate that is accepted (`certificate`), or that do not speak HTTP (`malformed`).

## Impact
Scrapes of others still succeed: each user of the node and each address has a share. It costs CPU time of the node, and
may be an attempt to blind the agent or to guess a password.

## Diagnosis
1. `ss -tnp 'sport = :9477'` on the node: who is connected. Users of the node are shown with their process.
2. The label `reason`: `password` is a client with an old password, or somebody who guesses.

## Mitigation
- Correct or stop the client. A firewall keeps strangers from the port; on loopback, talk to the user.
"""),
    ),
    Alert(
        "JournalDown",
        "max by (cluster, instance) (opsd_journal_up) == 0",
        severity="warning",
        hold="2m",
        summary="The journal of {{ $labels.instance }} cannot be written",
        description="Incidents are kept only in memory, and the agent takes no action: nothing would remember it.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "ConfigRefused",
        "max by (cluster, instance) (opsd_config_last_reload_successful) == 0",
        severity="warning",
        hold="2m",
        summary="{{ $labels.instance }} has refused its configuration",
        description="The agent goes on with the settings that it had. It would not start with the file as it is.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "RunbookFailing",
        "sum by (cluster, instance, kind) (increase(opsd_runbook_errors_total[10m])) > 0",
        severity="warning",
        summary="Runbook {{ $labels.kind }} raises errors on {{ $labels.instance }}",
        description="Incidents of this kind may go unnoticed on this node.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "IncidentEscalated",
        'sum by (cluster, instance, kind, severity) (opsd_incidents{state="escalated"}) > 0',
        summary="Incident {{ $labels.kind }} on {{ $labels.instance }} waits for a person",
        description="opsd has no remedy, is not allowed to apply it, or has used up its attempts.",
        guide=manual("""
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
"""),
    ),
    Alert(
        "ActionFailed",
        'sum by (cluster, instance, verb) (increase(opsd_actions_total{outcome="failed"}[10m])) > 0',
        severity="warning",
        summary="Action {{ $labels.verb }} failed on {{ $labels.instance }}",
        description="The agent tried to remedy an incident and failed.",
        guide=manual("""
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
"""),
    ),
)
