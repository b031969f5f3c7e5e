"""The configuration: every mistake is one sentence that says what to change, and nothing is silently ignored."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from opsd import config, exitcodes
from opsd.agent.web import access
from opsd.agent.web.access import WebConfigError
from opsd.collectors.ranks import RanksSettings
from opsd.commands.main import cli

NO_ENV: dict[str, str] = {}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[agent]\nlisen = "x"', "unknown key agent.lisen; did you mean agent.listen?"),
        ("[agents]\ninterval_s = 1", "unknown key agents; did you mean agent?"),
        ("[agent]\nmode = 'act'", "unknown key agent.mode; did you mean policy.mode?"),
        ("[agent]\ninterval_s = 'fast'", "agent.interval_s: should be a valid number, not 'fast'"),
        ("[agent]\ninterval_s = 0", "agent.interval_s: should be greater than or equal to 0.05, not 0"),
        ("[nvml]\nenabled = 1", "nvml.enabled: should be a valid boolean, not 1"),
        ("[policy]\nmode = 'yolo'", "policy.mode: should be 'observe', 'recommend' or 'act', not 'yolo'"),
        ("[policy.runbooks]\nrank_crahs = 'act'", "unknown runbook policy.runbooks.rank_crahs; did you mean policy."),
        ("[agent]\nlisten = '9477'", "agent.listen: should be ADDRESS:PORT, for instance 127.0.0.1:9477 or [::1]:9477"),
        ("[agent]\nlisten = 'localhost:99999'", "agent.listen: should be ADDRESS:PORT"),
        ("agent = 3", "agent: should be a valid dictionary"),
        ("[agent\n", "not valid TOML"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence_with_the_fix(tmp_path: Path, text: str, said: str) -> None:
    """Unknown keys name the nearest known one; wrong types and values say what is expected."""
    file = write(tmp_path / "opsd.toml", text)
    with pytest.raises(config.ConfigError) as caught:
        config.load(file, env=NO_ENV)
    assert str(caught.value).startswith(f"{file}: {said}") or said in str(caught.value)
    assert "\n" not in str(caught.value).removesuffix("\n")


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    """A file that was named must exist; nothing falls back to defaults in silence."""
    with pytest.raises(config.ConfigError, match=r"cannot be read: No such file or directory; `opsd config init"):
        config.load(tmp_path / "none.toml", env=NO_ENV)


def test_a_folder_in_place_of_the_file_is_not_written_over(tmp_path: Path) -> None:
    """The advice to write a file is given only where none is."""
    with pytest.raises(config.ConfigError, match=r"cannot be read: Is a directory$"):
        config.load(tmp_path, env=NO_ENV)


def test_settings_come_from_a_pipe_too(tmp_path: Path) -> None:
    """``--config <(envsubst < template)`` is a pipe, and ``--config /dev/null`` no settings at all."""
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        file.write('[agent]\nnode = "n17"\n')
    assert config.load(Path(f"/dev/fd/{reader}"), env=NO_ENV).agent.node == "n17"
    os.close(reader)
    assert config.load(Path("/dev/null"), env=NO_ENV).agent.node != "n17"


def test_only_files_that_end_are_read(tmp_path: Path) -> None:
    """An agent that reloads reads it in its loop: a device without end took 16 GiB, a pipe stopped all ticks."""
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    os.mkfifo(pipe)
    log.write_bytes(bytes(2 << 20))
    kinds = (
        (pipe, "a pipe into which nobody writes for 3 s"),
        (Path("/dev/zero"), "not a regular file"),
        (log, "larger than 1 MiB"),
    )
    for file, said in kinds:
        with pytest.raises(config.ConfigError, match=f"cannot be read: {said}$"):
            config.load(file, env=NO_ENV)
        with pytest.raises(WebConfigError, match=f"cannot be read: {said}$"):
            access.load(file)


def test_a_secret_is_never_part_of_a_sentence_or_of_what_is_shown(tmp_path: Path) -> None:
    """A webhook's address is its password."""
    file = write(tmp_path / "opsd.toml", "[notify]\nwebhook = 12345678")
    with pytest.raises(config.ConfigError) as caught:
        config.load(file, env=NO_ENV)
    assert "12345678" not in str(caught.value)
    settings = config.load(write(file, '[notify]\nwebhook = "https://h/s3cret"'), env=NO_ENV)
    assert "s3cret" not in config.to_toml(settings) + repr(settings)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            '[notify]\nwebhook = "https://h/s3cret"',
            "everybody can read it, and it has notify.webhook; put the URL into",
        ),
        ('[notify]\nwebhook_file = "SECRET"', "SECRET: everybody can read this secret; chmod 0600 SECRET"),
        (
            '[notify]\ngrafana_url = "https://g"\ngrafana_token_file = "SECRET"',
            "SECRET: everybody can read this secret",
        ),
        ('[agent]\npeer_credentials_file = "SECRET"', "SECRET: everybody can read this secret"),
    ],
)
def test_a_secret_that_everybody_can_read_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """The settings are open to all users of the node; what is secret has a file that is not."""
    secret, file = write(tmp_path / "secret", "https://h/s3cret"), tmp_path / "opsd.toml"
    write(file, text.replace("SECRET", str(secret)))
    secret.chmod(0o644)
    refused = CliRunner().invoke(cli, ["config", "check", str(file)])
    assert refused.exit_code != exitcodes.OK
    assert said.replace("SECRET", str(secret)) in refused.output
    for path in (secret, file):
        path.chmod(0o640)
    assert CliRunner().invoke(cli, ["config", "check", str(file)]).exit_code == exitcodes.OK


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder that this process may not look into."""
    folder = tmp_path / "closed"
    folder.mkdir(mode=0o000)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65_534)
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)


def test_a_system_file_that_may_not_be_read_is_a_sentence(closed: Path) -> None:
    """Neither a traceback nor the defaults in silence, which a launcher would take for a node without settings."""
    file = config.find_file(env=NO_ENV, system=closed / "opsd.toml")
    assert file == closed / "opsd.toml"
    with pytest.raises(config.ConfigError) as said:
        config.load(file, env=NO_ENV)
    hint = "let everybody read it, or name another file with OPSD_CONFIG"
    assert str(said.value) == f"{file}: cannot be read: Permission denied; {hint}"


def test_without_a_system_file_the_defaults_apply(tmp_path: Path) -> None:
    """On a laptop nothing has to be configured."""
    assert config.find_file(env=NO_ENV, system=tmp_path / "none/opsd.toml") is None


def test_later_sources_win(tmp_path: Path) -> None:
    """File, then environment, then --set."""
    file = write(tmp_path / "opsd.toml", '[agent]\nstate_dir = "/file"\ninterval_s = 2\n[ranks]\nroot = "/file"')
    env = {"OPSD_CONFIG": str(file), "OPSD_STATE_DIR": "/env", "OPSD_SHM": "/env"}
    settings = config.load(None, ["ranks.root=/set", "policy.mode=act", "agent.interval_s=0.5"], env)
    assert settings.agent.state_dir == Path("/env")
    assert settings.section(RanksSettings).root == Path("/set")
    assert (settings.agent.interval_s, settings.policy.mode) == (0.5, "act")


@pytest.mark.parametrize("override", ["interval_s=1", "agent.interval_s", "agent.listen.x=1"])
def test_a_malformed_override_is_refused(override: str) -> None:
    """--set takes section.key=value."""
    with pytest.raises(config.ConfigError):
        config.load(None, [override], NO_ENV)


def test_a_single_runbook_can_have_its_own_mode(tmp_path: Path) -> None:
    """The others keep the general one."""
    file = write(tmp_path / "opsd.toml", "[policy]\nmode = 'recommend'\n[policy.runbooks]\nrank_crash = 'act'")
    policy = config.load(file, env=NO_ENV).policy
    assert (policy.mode_of("rank_crash"), policy.mode_of("rank_hang")) == ("act", "recommend")


def test_what_show_prints_is_a_configuration_with_the_same_meaning(tmp_path: Path) -> None:
    """`opsd config show` can be saved and used."""
    settings = config.load(None, ["policy.runbooks={gpu_throttle='act'}", 'agent.node=a"b\\c'], NO_ENV)
    file = write(tmp_path / "opsd.toml", config.to_toml(settings))
    assert config.load(file, env=NO_ENV) == settings


def test_the_template_is_valid_with_every_line_switched_on(tmp_path: Path) -> None:
    """Each commented setting is a real key with a value of the right type."""
    lines = config.template().splitlines()
    settings_on = [line.removeprefix("# ") if " = " in line and not line.endswith(".") else line for line in lines]
    config.load(write(tmp_path / "opsd.toml", "\n".join(settings_on)), env=NO_ENV)
    assert all(f"# {key.partition('.')[2]} = " in config.template() for key in config.known_keys())


def test_commands(tmp_path: Path) -> None:
    """Init writes a file for everybody, once; check accepts it, show prints it, a mistake exits with the usage code."""
    run = CliRunner().invoke
    file = tmp_path / "etc" / "opsd.toml"
    assert run(cli, ["config", "init", str(file)]).exit_code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    again = run(cli, ["config", "init", str(file)], standalone_mode=False)
    assert "left alone" in str(again.exception)
    for named in ([str(file)], ["--config", str(file)]):
        assert run(cli, ["config", "check", *named]).output.endswith("opsd.toml: good\n")
    twice = run(cli, ["config", "check", str(file), "--config", str(file)])
    assert (twice.exit_code, "two files are named" in twice.output) == (exitcodes.USAGE, True)
    assert "[policy]" in run(cli, ["config", "show", "--config", str(file)]).output
    write(file, "[agent]\nlisen = 1")
    bad = run(cli, ["config", "check", str(file)])
    assert "did you mean agent.listen?" in bad.output
    assert bad.exit_code != exitcodes.OK


def test_the_template_goes_to_stdout() -> None:
    """As with other commands, - is no file name."""
    assert CliRunner().invoke(cli, ["config", "init", "-"]).output == config.template()
    assert not Path("-").exists()
