#!/bin/sh
# Slurm's Prolog: no job starts on a bad node. For exclusive nodes only: on shared nodes, the processes of one job would
# count as leftovers when the next one starts. slurm.conf:
#
#   Prolog=/etc/slurm/opsd/prolog.sh
#   PrologFlags=Alloc
#   BatchStartTimeout=180
#
# The quick profile takes one to two minutes on a node with GPUs. Its limit is 150 s, plus 15 s to end;
# BatchStartTimeout, and PrologEpilogTimeout if set, must be longer.
#
# A failed Prolog drains the node and requeues the job, so it fails only if the node failed. If the preflight cannot run
# or takes too long, the job starts and the system log says so: testing GPUs needs torch (`deploy/install --train` or
# preflight.python), and checks that may be unable to run belong in preflight.optional. A Prolog must not call Slurm's
# commands, so never add --act.
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin} # Slurm sets none
export PATH
OPSD=${OPSD:-/opt/opsd/bin/opsd}
[ -x "$OPSD" ] || exit 0
report=${REPORTS:-/run}/opsd-prolog-${SLURM_JOB_ID:-0}.json
rm -f "$report"
said=$(timeout -k 15 150 "$OPSD" preflight --profile quick --quiet --json "$report" 2>&1)
code=$?
case $code in
    0) why= ;;
    1)
        if [ -s "$report" ]; then
            logger -t opsd "this node failed its preflight, job ${SLURM_JOB_ID:-?} does not start; see $report"
            exit 1
        fi
        why="the preflight ended with exit code 1 and no report: $said" # Python's own 1: opsd is being upgraded, say
        ;;
    124 | 137) why="the preflight took longer than 150 s" ;;
    *) why="the preflight ended with exit code $code: $said" ;;
esac
rm -f "$report"
[ -z "$why" ] || logger -t opsd "job ${SLURM_JOB_ID:-?} starts unchecked: $why"
exit 0
