"""The run over all its nodes: the leader's decisions, and each launcher's part in them."""
