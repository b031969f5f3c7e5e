"""The configuration: one TOML file becomes one frozen tree of settings.

The file is the one named with ``--config``, else ``$OPSD_CONFIG``, else ``/etc/opsd/opsd.toml``, else there is none and
the defaults apply. ``OPSD_STATE_DIR`` and ``OPSD_SHM`` win over the file. A file that is missing, malformed or has an
unknown key raises ConfigError with one sentence that says what to change; commands exit with ``exitcodes.USAGE`` then.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationError

from opsd.runbooks import RUNBOOKS
from opsd.settings.policy import PolicySettings
from opsd.settings.preflight import PreflightSettings
from opsd.settings.spare import SpareSettings

SYSTEM_FILE = Path("/etc/opsd/opsd.toml")


class ConfigError(Exception):
    """A configuration that cannot be used; the message is one sentence for its author."""


def default_state_dir() -> Path:
    """``/var/lib/opsd`` for root, ``$XDG_STATE_HOME/opsd`` (``~/.local/state/opsd``) for everybody else."""
    if os.geteuid() == 0:
        return Path("/var/lib/opsd")
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state") / "opsd"


def _is_address(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^:\[\]\s]+):\d{1,5}", text) or int(text.rpartition(":")[2]) > 65_535:
        raise ValueError("should be ADDRESS:PORT, for instance 127.0.0.1:9477 or [::1]:9477")
    return text


AnyPath = Annotated[Path, Field(strict=False)]


def _is_local_url(text: str) -> str:
    if not re.fullmatch(r"http://(localhost|127\.\d+\.\d+\.\d+|\[::1\])(:\d{1,5})?/[^\s?#]*", text):
        raise ValueError("should be http:// on this node, for instance http://localhost:9400/metrics")
    return text


def _is_web_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@?#]+(/[^\s?#]*)?", text):
        raise ValueError("should be http:// or https:// and a host, for instance https://grafana.example.com")
    return text


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class AgentSettings(_Section):
    """The node agent."""

    listen: Annotated[str, AfterValidator(_is_address)] = Field(
        default="127.0.0.1:9477",
        description="Address and port of /metrics and the API. Everybody who reaches it can read it.",
    )
    web_config: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/web.yml"],
        description="File with certificate and passwords in the format of Prometheus' exporters (opsd[web]).",
    )
    peer_ca_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/ca.crt"],
        description="Certificates to trust when the page of a job asks the agents of its other nodes over TLS.",
    )
    peer_credentials_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/peer-credentials"],
        description="File with USER:PASSWORD that these agents ask for. Used only with agent.web_config.",
    )
    interval_s: float = Field(default=1.0, ge=0.05, le=60, description="Seconds between two collections.")
    deadline_s: float = Field(
        default=2.0, gt=0, le=300, description="A collector that takes longer is marked as hung and its series vanish."
    )
    window_s: float = Field(
        default=600.0, ge=10, le=86_400, description="How much past the runbooks can look at, in seconds."
    )
    state_dir: AnyPath = Field(
        default_factory=default_state_dir,
        examples=["/var/lib/opsd"],
        description="Folder of the journal. By default /var/lib/opsd for root and ~/.local/state/opsd for others; "
        "OPSD_STATE_DIR wins.",
    )
    node: str = Field(
        default_factory=lambda: os.uname().nodename,
        min_length=1,
        examples=["node-0017"],
        description="Name of this node, if it is not the host name.",
    )


class NvmlSettings(_Section):
    """GPUs through the NVIDIA driver."""

    enabled: bool = Field(default=True, description="Collect from the NVIDIA driver.")
    library: str | None = Field(
        default=None, examples=["/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"], description="The driver's library."
    )
    profiling: bool = Field(
        default=True, description="Read what the GPUs' units do (SM, tensor cores, memory), on Hopper and later."
    )


class HostSettings(_Section):
    """Processors, memory and disks of the node."""

    enabled: bool = Field(default=True, description="Collect host metrics.")
    mounts: tuple[AnyPath, ...] = Field(
        default=(Path("/"), Path("/dev/shm")),  # noqa: S108
        strict=False,
        description="Mount points whose free space is watched, besides all disks and network file systems.",
    )


class KmsgSettings(_Section):
    """The kernel's log."""

    enabled: bool = Field(default=True, description="Follow the kernel's log for Xids and other trouble. Needs root.")


class InfinibandSettings(_Section):
    """InfiniBand, RoCE and EFA ports."""

    enabled: bool = Field(default=True, description="Collect the state and the counters of RDMA ports.")
    root: AnyPath = Field(default=Path("/sys/class/infiniband"), description="Folder with one folder per RDMA device.")
    interval_s: float = Field(default=2.0, ge=0, le=3600, description="Seconds between two looks at the ports.")


class StorageSettings(_Section):
    """Disks, mounts and the page cache, as the kernel sees them."""

    enabled: bool = Field(default=True, description="Collect from disks, mounts and NFS clients.")


class StorageNetSettings(_Section):
    """Network file systems, asked for their size."""

    enabled: bool = Field(
        default=True, description="Ask network file systems for their size, and watch how long it takes."
    )
    interval_s: float = Field(default=5.0, ge=0, le=3600, description="Seconds between two such questions.")


class NvmeSettings(_Section):
    """Health of NVMe drives."""

    enabled: bool = Field(default=True, description="Ask NVMe drives for wear, errors and temperature. Needs root.")
    interval_s: float = Field(default=60.0, ge=0, le=86_400, description="Seconds between two such questions.")


class SlurmSettings(_Section):
    """What Slurm thinks of this node."""

    enabled: bool = Field(default=True, description="Ask Slurm for the state of this node and the jobs on it.")
    interval_s: float = Field(default=20.0, ge=1, le=3600, description="Seconds between two such questions.")


class RanksSettings(_Section):
    """Training ranks on this node, through their rank pages."""

    enabled: bool = Field(default=True, description="Read the rank pages of the runs on this node.")
    root: AnyPath = Field(
        default=Path("/dev/shm/opsd"),  # noqa: S108
        description="Folder in shared memory with one folder per run; OPSD_SHM wins.",
    )


class DcgmSettings(_Section):
    """GPUs through dcgm-exporter, or else the DCGM host engine, where one of them runs on the node."""

    enabled: bool = Field(
        default=True,
        description="Take from DCGM what it has, and do not ask the driver for the same again.",
    )
    url: Annotated[str, AfterValidator(_is_local_url)] = Field(
        default="http://localhost:9400/metrics", description="Where dcgm-exporter answers on this node."
    )
    interval_s: float = Field(default=5.0, ge=0, le=3600, description="Seconds between two such questions.")


class NcclSettings(_Section):
    """NCCL of the runs on this node."""

    enabled: bool = Field(
        default=True, description="Ask NCCL's RAS service, and follow rank logs and flight recorder dumps."
    )
    ras: tuple[Annotated[str, AfterValidator(_is_address)], ...] = Field(
        default=("127.0.0.1:28028", "[::1]:28028"),
        min_length=1,
        strict=False,
        description="Addresses where RAS may listen; NCCL_RAS_ADDR of the runs.",
    )
    interval_s: float = Field(default=10.0, ge=1, le=3600, description="Seconds between two questions to RAS.")


class NotifySettings(_Section):
    """Telling people."""

    webhook: SecretStr | None = Field(
        default=None,
        examples=["https://hooks.example.com/services/..."],
        description="URL that receives a JSON object for every incident opened, escalated or resolved. It is a secret: "
        "others must not be able to read a file that has it, so webhook_file suits this one better.",
    )
    webhook_file: AnyPath | None = Field(
        default=None,
        examples=["/etc/opsd/webhook"],
        description="File with that URL, instead of it.",
    )
    grafana_url: Annotated[str, AfterValidator(_is_web_url)] | None = Field(
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
        """The URL to post to, or the file that has it; None if nobody is told."""
        return self.webhook_file or (self.webhook.get_secret_value() if self.webhook else None)


class Settings(_Section):
    """Everything that can be configured; the field names are the sections of the file."""

    agent: AgentSettings = AgentSettings()
    nvml: NvmlSettings = NvmlSettings()
    kmsg: KmsgSettings = KmsgSettings()
    host: HostSettings = HostSettings()
    infiniband: InfinibandSettings = InfinibandSettings()
    storage: StorageSettings = StorageSettings()
    storage_net: StorageNetSettings = StorageNetSettings()
    nvme: NvmeSettings = NvmeSettings()
    slurm: SlurmSettings = SlurmSettings()
    ranks: RanksSettings = RanksSettings()
    dcgm: DcgmSettings = DcgmSettings()
    nccl: NcclSettings = NcclSettings()
    spare: SpareSettings = SpareSettings()
    policy: PolicySettings = PolicySettings()
    notify: NotifySettings = NotifySettings()
    preflight: PreflightSettings = PreflightSettings()


def sections() -> Iterator[tuple[str, type[BaseModel]]]:
    """Name and model of each section, in the order of the file."""
    for name, field in Settings.model_fields.items():
        assert isinstance(field.annotation, type)
        yield name, field.annotation


def find_file(path: Path | None = None, env: Mapping[str, str] = os.environ, system: Path = SYSTEM_FILE) -> Path | None:
    """The configuration file that applies, or None for the built-in defaults.

    A file that was named (by ``path`` or ``OPSD_CONFIG``) is returned whether it exists or not, the ``system``'s unless
    it surely does not: settings that may not be read are not the defaults.
    """
    if path is not None:
        return path
    if named := env.get("OPSD_CONFIG"):
        return Path(named)
    try:
        system.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass
    return system


def load(path: Path | None = None, overrides: Sequence[str] = (), env: Mapping[str, str] = os.environ) -> Settings:
    """Settings from the file that applies, the environment, and ``overrides`` ("agent.interval_s=0.5"), last one wins.

    Raises ConfigError.
    """
    file = find_file(path, env)
    data = {} if file is None else _read(file)
    _set(data, "agent.state_dir", env.get("OPSD_STATE_DIR"))
    _set(data, "ranks.root", env.get("OPSD_SHM"))
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or "." not in key:
            raise ConfigError(f"--set {override}: write section.key=value, for instance agent.interval_s=0.5")
        _set(data, key.strip(), _parse_value(value.strip()))
    return _validate(data, "" if file is None else f"{file}: ")


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        hint = ""
        if isinstance(error, FileNotFoundError):
            hint = f"; `opsd config init {file}` writes one"
        elif isinstance(error, PermissionError):
            hint = "; let everybody read it, or name another file with OPSD_CONFIG"
        raise ConfigError(f"{file}: cannot be read: {error.strerror}{hint}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not a text file in UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error


def _set(data: dict[str, Any], dotted: str, value: object) -> None:
    if value is None:
        return
    *outer, last = dotted.split(".")
    for key in outer:
        inner = data.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{dotted}: {key} is a value, not a section")
        data = inner
    data[last] = value


def _parse_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _validate(data: Mapping[str, Any], where: str) -> Settings:
    try:
        settings = Settings.model_validate(data)
    except ValidationError as error:
        raise ConfigError(where + _sentence(error)) from error
    kinds = [runbook.kind for runbook in RUNBOOKS]
    for key, kind in settings.policy.named_kinds():
        if kind not in kinds:
            raise ConfigError(f"{where}unknown runbook {key}.{kind}{_suggest(kind, kinds, f'{key}.')}")
    return settings


def _sentence(error: ValidationError) -> str:
    """The first problem in one sentence; an unknown key comes before everything else."""
    problems = error.errors(include_url=False)
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    dotted = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {dotted}{_suggest_key(dotted)}"
    value = problem["input"]
    shown = "" if dotted.startswith("notify.") else f", not {value!r}"
    said = problem["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{dotted}: {said[0].lower()}{said[1:]}{shown}"


def secret_files(settings: Settings) -> list[Path]:
    """Files with a secret that the settings make use of."""
    agent, notify = settings.agent, settings.notify
    token = notify.grafana_token_file if notify.grafana_url else None
    return [file for file in (agent.peer_credentials_file, notify.webhook_file, token) if file is not None]


def known_keys() -> list[str]:
    """Every settable key as ``section.key``."""
    return [f"{section}.{key}" for section, model in sections() for key in model.model_fields]


def _suggest_key(dotted: str) -> str:
    if "." not in dotted:
        return _suggest(dotted, [name for name, _ in sections()])
    section, _, key = dotted.partition(".")
    elsewhere = [known for known in known_keys() if known.endswith("." + key)]
    if elsewhere:
        return f"; did you mean {elsewhere[0]}?"
    return _suggest(dotted, [known for known in known_keys() if known.startswith(section + ".")])


def _suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {prefix}{nearest[0]}?" if nearest else f"; known are {', '.join(known)}"


def to_toml(settings: Settings) -> str:
    """The settings in force as TOML; secrets are masked, unset values are left out."""
    blocks = []
    for section, model in sections():
        values = getattr(settings, section)
        lines = [
            f"{key} = {literal(getattr(values, key))}" for key in model.model_fields if getattr(values, key) is not None
        ]
        blocks.append("\n".join([f"[{section}]", *lines]) + "\n")
    return "\n".join(blocks)


def template() -> str:
    """A configuration file in which every setting is explained and commented out at its default."""
    blocks = ["# Configuration of opsd. What is commented out shows the default or an example.\n"]
    for section, model in sections():
        lines = [f"[{section}]"]
        for key, field in model.model_fields.items():
            value = field.examples[0] if field.examples else field.default
            lines += [f"# {field.description}", f"# {key} = {literal(value)}"]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def _key(name: str) -> str:
    """``name`` as a TOML key, in quotes where it needs them."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else literal(name)


def literal(value: object) -> str:
    """``value`` as a TOML literal."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, BaseModel):
        return literal(value.model_dump(exclude_defaults=True))
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(str(key))} = {literal(item)}" for key, item in value.items())
        return f"{{ {pairs} }}" if value else "{}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
