"""How the launchers of one run agree on who is alive, who is head, and which generation of ranks is the valid one."""
