"""Scenarios: timelines of a simulated node, played through the agent's real judgement under a virtual clock."""
