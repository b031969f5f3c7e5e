"""Where the wall clock of a run went."""
