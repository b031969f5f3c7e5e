"""The rank processes of one node: start, monitoring, shutdown."""
