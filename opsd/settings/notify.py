"""The ``[notify]`` section of the configuration."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr

from opsd import DISTRIBUTION
from opsd.settings.section import AnyPath, Section, WebUrl


class NotifySettings(Section):
    """Telling people."""

    webhook: SecretStr | None = Field(
        default=None,
        examples=["https://hooks.example.com/services/..."],
        description="URL that is told of every incident opened, escalated or resolved. A webhook gets a JSON object, "
        "and Slack, Discord and Teams their own form. apprise delivers to all others, such as mailtos:// and "
        f"pagerduty:// ({DISTRIBUTION}[notify]). The URL is a secret, so webhook_file suits this file better.",
    )
    webhook_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/webhook"],
        description="File with such URLs, one a line, instead of it.",
    )
    grafana_url: WebUrl | None = Field(
        default=None,
        examples=["https://grafana.example.com"],
        description="Grafana into which incidents and actions are written as annotations.",
    )
    grafana_token_file: AnyPath = Field(
        default=Path("/etc/opsd/grafana-token"),
        description="File with the token of a Grafana service account that may write annotations.",
    )

    @property
    def receiver(self) -> str | Path | None:
        """The URL to post to, or the file that has it; None without notifications."""
        return self.webhook_file or (self.webhook.get_secret_value() if self.webhook else None)
