#!/bin/sh
# Slurm's HealthCheckProgram: see to it that somebody watches this node. slurm.conf:
#
#   HealthCheckProgram=/etc/slurm/opsd/health_check.sh
#   HealthCheckInterval=120
#   HealthCheckNodeState=ANY,CYCLE
#
# It runs before slurmd registers, when scontrol can hang, so it calls none of Slurm's commands. Draining is the
# agent's: it knows the evidence and the share of the cluster that may be drained (policy.drain). An agent that is to
# stay stopped is disabled: `systemctl disable --now opsd`.
systemctl is-enabled --quiet opsd || exit 0
systemctl is-active --quiet opsd && exit 0
logger -t opsd "the agent was not running; starting it"
timeout 20 systemctl restart opsd || logger -t opsd "the agent could not be started; see journalctl -u opsd"
exit 0
