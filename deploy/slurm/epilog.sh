#!/bin/sh
# Slurm's Epilog: name what a job has left behind, in the system's log, for the agent and the next prolog. slurm.conf:
#
#   Epilog=/etc/slurm/opsd/epilog.sh
#
# It never fails: an Epilog that does drains the node, and leftovers are found again by the prolog of the next job.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin} # Slurm sets none
export PATH
OPSD=${OPSD:-/opt/opsd/bin/opsd}
[ -x "$OPSD" ] || exit 0
timeout 30 "$OPSD" preflight --only leftovers --quiet ||
    logger -t opsd "job ${SLURM_JOB_ID:-?} of ${SLURM_JOB_USER:-?} left something behind; opsd preflight --only leftovers says what"
exit 0
