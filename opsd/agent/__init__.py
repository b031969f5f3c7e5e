"""The node agent: collect, judge, keep the journal, act on its own node."""
