#!/bin/sh
# Slurm's Prolog: no job starts on a bad node. For exclusive nodes only: on shared nodes, the processes of one job would
# count as leftovers when the next one starts. slurm.conf:
#
#   Prolog=/etc/slurm/opsd/prolog.sh
#   PrologFlags=Alloc
#   BatchStartTimeout=180
#
# The quick profile takes one to two minutes on a node with GPUs. It has LIMIT_S seconds, and END_S more to end and to
# say so; BatchStartTimeout, and PrologEpilogTimeout if set, must be longer than both. The prolog takes no longer than
# that, even if the check hangs in the kernel: it waits for a file, not for a process.
#
# A failed Prolog drains the node and requeues the job, so it fails only for one word: "unfit", which the preflight
# writes after all checks have ended and one of them has failed. Anything else (a broken installation, a check that could
# not run or was killed, no time left) cannot tell: the job starts, the system log says why, and so does the agent's
# alert PrologBlind, from the word in /run/opsd-prolog. Testing GPUs needs torch (`deploy/install --train` or
# preflight.python). A Prolog must not call Slurm's commands, so never add --act.
LIMIT_S=${LIMIT_S:-150}
END_S=15 SAY_S=5
PATH=${PATH:-/usr/sbin:/usr/bin:/sbin:/bin} # Slurm sets none
export PATH
OPSD=${OPSD:-/opt/opsd/bin/opsd}
reports=${REPORTS:-/run}
report=$reports/opsd-prolog-${SLURM_JOB_ID:-0}.json
umask 022

say() { timeout -s KILL "$SAY_S" logger -t opsd "$1" </dev/null >/dev/null 2>&1; }
starts_unchecked() {
    say "job ${SLURM_JOB_ID:-?} starts unchecked: $1"
    exit 0
}
# Waits until the preflight has ended or written its verdict, $1 seconds at most.
wait_for_verdict() {
    read -r up _ </proc/uptime
    end=$((${up%.*} + $1))
    until [ -e "$private/ended" ] || [ -s "$private/verdict" ] || [ "${up%.*}" -ge "$end" ]; do
        sleep 0.2
        read -r up _ </proc/uptime
    done
}

rm -f "$report"
private=$(mktemp -d "$reports/opsd-prolog.XXXXXX") || starts_unchecked "$reports cannot be written"
# In a session of its own, with no file that anybody waits for. To look at $OPSD may hang, too.
setsid sh -c '
    private=$1; shift
    if [ -x "$1" ]; then "$@" >"$private/said" 2>&1; echo "exit code $?" >"$private/ended"
    else echo none >"$private/verdict"; fi
' sh "$private" "$OPSD" preflight --profile quick --quiet --json "$report" --verdict "$private/verdict" \
    </dev/null >/dev/null 2>&1 &
check=$! late=
wait_for_verdict "$LIMIT_S"
if [ ! -e "$private/ended" ] && [ ! -s "$private/verdict" ]; then
    late="the preflight took longer than $LIMIT_S s"
    kill -TERM -- "-$check" 2>/dev/null
    wait_for_verdict $((END_S - SAY_S))
    kill -KILL -- "-$check" 2>/dev/null
fi
verdict=$(head -c 20 "$private/verdict" 2>/dev/null)
why=${late:-"the preflight ended with $(head -c 40 "$private/ended" 2>/dev/null), the verdict ${verdict:-none}: $(
    tail -c 500 "$private/said" 2>/dev/null | tr '\n' ' '
)"}
case ${late:+late}$verdict in fit | unfit | none) ;; *) verdict=unknown ;; esac
if [ "$verdict" != none ]; then
    echo "$verdict $(date +%s)" >"$private/last" && mv -f "$private/last" "$reports/opsd-prolog"
fi
rm -rf "$private"
if [ "$verdict" = unfit ]; then
    say "this node failed its preflight, job ${SLURM_JOB_ID:-?} does not start; see $report"
    exit 1
fi
rm -f "$report"
[ "$verdict" != unknown ] || starts_unchecked "$why"
exit 0
