"""The ``opsd`` command and its subcommands, one file each; nothing imports from here."""
