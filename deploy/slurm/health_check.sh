#!/bin/sh
# Slurm's HealthCheckProgram: make sure that the agent runs on this node. slurm.conf:
#
#   HealthCheckProgram=/etc/slurm/opsd/health_check.sh
#   HealthCheckInterval=120
#   HealthCheckNodeState=ANY,CYCLE
#
# It runs before slurmd registers, when scontrol can hang, so it calls none of Slurm's commands. Draining is left to the
# agent, which knows the evidence and the share of the cluster that may be drained (policy.drain). To keep an agent
# stopped, disable it: `systemctl disable --now opsd`.
systemctl is-enabled --quiet opsd || exit 0
systemctl is-active --quiet opsd && exit 0
logger -t opsd "the agent was not running; starting it"
timeout 20 systemctl restart opsd || logger -t opsd "the agent could not be started; see journalctl -u opsd"
exit 0
