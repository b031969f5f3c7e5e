# Sourced by deploy/deb and deploy/rpm: reads their options and puts what they package below $root, as deploy/install does,
# but in the folders of a distribution. Sets out (folder of the package), stage (folder for temporary files), root,
# version and maintainer (of the package) and minor (of its Python).
set -euo pipefail
umask 022

here=$(cd "$(dirname "$0")" && pwd)
source=()
out=.

fail() { echo "opsd: $1" >&2; exit "${2:-1}"; }

while [ $# -gt 0 ]; do
    case $1 in
        --wheel) [ $# -ge 2 ] || fail "--wheel needs a file" 2; source+=("$1" "$2"); shift ;;
        --requirements) [ $# -ge 2 ] || fail "--requirements needs a folder" 2; source+=("$1" "$2"); shift ;;
        -h | --help) sed -n '2,/^$/s/^# \{0,1\}//p' "$0"; exit 0 ;;
        -*) fail "unknown option $1; see deploy/${0##*/} --help" 2 ;;
        *) out=$1 ;;
    esac
    shift
done
[ -d "$out" ] || fail "$out: no such folder" 2
command -v "$builder" >/dev/null || fail "$builder is not here: build the package on a system that has it"

stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
root=$stage/root
mkdir -p "$root/usr/lib/systemd/system"
DESTDIR=$root PYTHON=${PYTHON:-/usr/bin/python3} "$here/install" "${source[@]}"
mv "$root"/etc/systemd/system/* "$root/usr/lib/systemd/system/"
rmdir "$root/etc/systemd/system" "$root/etc/systemd"
mv "$root/usr/local/bin" "$root/usr/bin"
mv "$root/usr/local/share" "$root/usr/share"
rmdir "$root/usr/local"
gzip --best --no-name "$root"/usr/share/man/man1/*
find "$root/opt/opsd" -name __pycache__ -prune -exec rm -r {} +

python() { "$root/opt/opsd/bin/python" -B -c "$1"; }
about() { # the field $1 of pyproject.toml, as the wheel has it
    python "from importlib import metadata as m; print(m.metadata(m.packages_distributions()['opsd'][0])['$1'] or '')"
}
version=$(about Version)
maintainer=$(about Maintainer-email)
[ -n "$maintainer" ] || fail "the wheel names no maintainer: pyproject.toml has one"
minor=$(python 'import sys; print(sys.version_info.minor)')
