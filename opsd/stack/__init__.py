"""The whole monitoring stack on one machine: real Prometheus and Alertmanager around an agent with simulated GPUs."""
