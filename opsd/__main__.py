"""``python -m opsd``: the command line for those who start it through an interpreter."""

from opsd.commands.main import main

main()
