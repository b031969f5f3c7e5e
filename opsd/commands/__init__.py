"""The ``opsd`` command and its subcommands, one file each; nothing imports from here."""

import sys

from opsd.own_packages import prefer_own_packages

if sys.version_info < (3, 11):  # noqa: UP036  # a checkout has no installer that says so
    print(
        "opsd: {} is Python {}.{}; opsd needs 3.11 or later".format(sys.executable, *sys.version_info), file=sys.stderr
    )
    sys.exit(2)  # exitcodes.USAGE: such a Python may not import that
prefer_own_packages()
