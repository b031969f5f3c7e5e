"""A running agent that reads its configuration again."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from opsd import exitcodes
from tests.fakes.clock import eventually
from tests.fakes.process import Opsd

pytestmark = pytest.mark.xdist_group("agent-process")


@pytest.fixture
def opsd(tmp_path: Path) -> Opsd:
    return Opsd(tmp_path)


def status(opsd: Opsd) -> dict[str, Any]:
    return json.loads(opsd.get("/api/v1/status") or "{}")


def test_a_hangup_reloads_the_configuration(opsd: Opsd) -> None:
    """It ended the agent, which systemd took for a clean exit. A file that is wrong changes nothing."""
    good = opsd.config.read_text()
    with opsd.agent("--set=agent.interval_s=0.1") as process:
        opsd.config.write_text(good + '[policy]\nmode = "recommend"\n[thermal]\nenabled = false\n')
        process.send_signal(signal.SIGHUP)
        assert eventually(lambda: status(opsd).get("mode") == "recommend")
        assert eventually(lambda: "thermal" not in [each["name"] for each in status(opsd)["collectors"]])
        opsd.config.write_text("[agent]\nlisen = 1\n")
        process.send_signal(signal.SIGHUP)
        assert eventually(opsd.shows("opsd_config_last_reload_successful 0.0"))
        said = status(opsd)
        assert "unknown key agent.lisen" in said["config"]["problem"]
        assert (said["mode"], process.poll()) == ("recommend", None)
        assert opsd.get("/healthz")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == exitcodes.OK
    assert "configuration refused, the old one stays" in log
    assert "Traceback" not in log


def test_the_command_says_what_came_of_it(opsd: Opsd) -> None:
    """Done, refused, or needing a restart; it finds the agent by what the kernel knows of its journal."""
    good = opsd.config.read_text()
    reload = ("config", "reload", "--config", str(opsd.config), "--url", f"http://127.0.0.1:{opsd.port}")
    with opsd.agent("--set=agent.interval_s=0.1"):
        assert eventually((opsd.folder / "state/journal.lock").exists)
        assert opsd.run(*reload).stdout == "reloaded\n"
        opsd.config.write_text(good.replace("[agent]", "[agent]\ndeadline_s = 3.0"))
        assert opsd.run(*reload).stdout == "reloaded; at the next start of the agent: agent.deadline_s\n"
        opsd.config.write_text(good.replace("[agent]", "[agent]\nweb_config = '/none.yml'"))
        refused = opsd.run(*reload)
        assert refused.returncode == exitcodes.FAILED
        assert "refused, the old configuration stays: /none.yml" in refused.stderr
        opsd.config.write_text("[agent]\nlisen = 1\n")  # the command cannot tell from it where the agent is
        unusable = opsd.run(*reload[:4])
        assert unusable.returncode == exitcodes.FAILED
        assert "refused, the agent was not told" in unusable.stderr and "unknown key agent.lisen" in unusable.stderr
        opsd.config.write_text(good)
    nobody = opsd.run(*reload)
    assert nobody.returncode == exitcodes.FAILED
    assert "no agent answers" in nobody.stderr
