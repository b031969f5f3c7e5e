"""Grafana dashboards as code: one builder per board, the generated JSON beside it."""
