#!/bin/sh
# Slurm's Epilog: write what a job has left behind to the system log, for the agent and the next prolog. slurm.conf:
#
#   Epilog=/etc/slurm/opsd/epilog.sh
#
# It never fails, because a failed Epilog drains the node; the prolog of the next job finds leftovers again.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin} # Slurm sets none
export PATH
OPSD=${OPSD:-/opt/opsd/bin/opsd}
[ -x "$OPSD" ] || exit 0
timeout 30 "$OPSD" preflight --only leftovers --quiet ||
    logger -t opsd "job ${SLURM_JOB_ID:-?} of ${SLURM_JOB_USER:-?} left something behind; opsd preflight --only leftovers says what"
exit 0
