"""The cost of a run: GPU-hours, and money if ``cost.gpu_hour`` is set."""

from __future__ import annotations

from dataclasses import dataclass

from opsd.report.run import RunReport


@dataclass(frozen=True, slots=True)
class Price:
    """Of an hour of one GPU; 0 if it is not known."""

    gpu_hour: float = 0.0
    currency: str = "USD"

    def of(self, hours: float) -> str:
        """``hours`` of a GPU in money, "" without a price."""
        return f"{hours * self.gpu_hour:,.2f} {self.currency}" if self.gpu_hour else ""


def cost_line(run: RunReport, price: Price) -> str:
    """``12.4 GPU-hours, 31.00 USD; failures cost 0.80 of them, 2.00 USD``; "" for a run without GPUs."""
    if not run.gpus:
        return ""
    parts = [f"{run.gpu_hours:,.2f} GPU-hours", price.of(run.gpu_hours)]
    lost = [f"failures cost {run.lost_gpu_hours:,.2f} of them", price.of(run.lost_gpu_hours)]
    told = ", ".join(filter(None, parts))
    return f"{told}; {', '.join(filter(None, lost))}" if run.restarts else told


def configured_price() -> Price:
    """The price in the configuration of this node; none without a file, or with one that cannot be used."""
    from opsd import config  # takes a quarter of a second

    if config.find_file() is None:
        return Price()
    try:
        cost = config.load().cost
    except config.ConfigError:
        return Price()
    return Price(cost.gpu_hour, cost.currency)
