"""Grafana boards, as the JSON that Grafana exports, and Prometheus' alerts."""
