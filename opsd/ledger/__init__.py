"""How the wall-clock time of a run was spent."""
