"""From drained to healed: the repair of a node that opsd has taken out, up to its return or its replacement."""
