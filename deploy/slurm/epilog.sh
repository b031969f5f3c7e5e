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
verdict=$(mktemp "${REPORTS:-/run}/opsd-epilog.XXXXXX") || exit 0
timeout -k 5 30 "$OPSD" preflight --only leftovers --quiet --verdict "$verdict" </dev/null >/dev/null 2>&1
if [ "$(head -c 20 "$verdict" 2>/dev/null)" = unfit ]; then
    said="job ${SLURM_JOB_ID:-?} of ${SLURM_JOB_USER:-?} left something behind"
    timeout -s KILL 5 logger -t opsd "$said; opsd preflight --only leftovers says what" </dev/null >/dev/null 2>&1
fi
rm -f "$verdict"
exit 0
