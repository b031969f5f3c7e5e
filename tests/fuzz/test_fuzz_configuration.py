"""Whatever stands in the file of settings: settings, or one sentence that says what to change."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from hypothesis import strategies as st

from opsd import config
from opsd.config import ConfigError
from tests.fakes.fuzzing import AMOUNTS, changed, fuzz, json_values, texts

EXAMPLE = (Path(__file__).parents[2] / "deploy" / "opsd.toml.example").read_bytes()
_LINES = [line.removeprefix(b"# ") if b" = " in line else line for line in EXAMPLE.splitlines()]
FULL = b"\n".join(line for line in _LINES if not line.startswith(b"webhook ="))
"""Every setting with a value, but for the one that is masked where it is shown."""
SEEDS: tuple[bytes, ...] = (
    b"[agent]\ninterval_s = nan\n",
    b"[agent]\nlisten = '[::1'\n",
    b'[agent]\nnode = "a\\nb\\u007f"\n[storage]\n"\\u0000" = 1\n',
    b'[agent]\nnode = "a\\tb\\u007f\\"c"\n',
    b"[policy]\nmaintenance = [{ start = 9999-12-31T23:59:59Z, end = 0001-01-01 }]\n",
    b"a." * 2000 + b"b = 1\n",
    b"a = " + b"[" * 2000,
    b"agent = 1\nranks = 1\n",
    b"[preflight]\nlimits = { gpu_burn = 1e400 }\n",
    b"[policy]\nmax_actions_per_hour = " + b"9" * 5000,
)


@AMOUNTS
def test_no_file_is_a_bug(amount: int, memory_folder: Path) -> None:
    """Edited, cut short, or no TOML at all; what is accepted can be written down and read again."""
    file = memory_folder / "opsd.toml"

    def load(content: bytes) -> None:
        file.write_bytes(content)
        try:
            settings = config.load(file, env={})
        except ConfigError as error:
            assert "\n" not in str(error).strip(), error
            return
        file.write_text(config.to_toml(settings), encoding="utf-8")
        assert config.load(file, env={}) == settings

    fuzz(load, changed(EXAMPLE, FULL), amount, SEEDS)


@AMOUNTS
def test_no_override_is_a_bug(amount: int, tmp_path: Path) -> None:
    """``--set``: any key with any value."""
    keys = st.sampled_from(config.known_keys()) | texts
    overrides = st.tuples(keys, json_values.map(repr) | texts).map(lambda pair: f"{pair[0]}={pair[1]}")

    (empty := tmp_path / "empty.toml").touch()

    def load(override: str) -> None:
        with suppress(ConfigError):
            config.load(empty, [override], env={})

    fuzz(load, overrides, amount, ["agent.interval_s=" + "[" * 5000, "agent.=1", ".=", "agent.listen.x=1"])
