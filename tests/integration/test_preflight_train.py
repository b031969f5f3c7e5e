"""`opsd preflight --train` and `opsd preflight network` with real processes over gloo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from opsd import exitcodes
from opsd.preflight.base import Verdict
from opsd.preflight.report import Report

pytest.importorskip("torch")
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from threading import Thread

import pytest

from opsd.ports import free_port
from tests.fakes.clock import eventually
from tests.fakes.namespaces import Namespaces, NoNamespacesError

pytestmark = pytest.mark.slow


# `opsd preflight --train`: the run itself is tried, with a rank killed on the way.


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small corpus made from this project's own sources."""
    folder = tmp_path_factory.mktemp("corpus")
    text = Path(__file__).parents[2] / "opsd"
    command = [sys.executable, "-m", "opsd.trainer.data", str(text), "--out", str(folder / "shards"), "--vocab", "2048"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder / "shards"


def preflight(tmp_path: Path, shards: Path, checks: str, *options: str) -> tuple[int, Report]:
    """Exit code and report of the checks of a run of the tiny preset."""
    environment = {**os.environ, "OPSD_SHM": str(tmp_path / "shm"), "OMP_NUM_THREADS": "1"}
    report = tmp_path / "report.json"
    command = [
        sys.executable, "-m", "opsd", "preflight", "--profile=standard", f"--only={checks}", "--train=tiny", "--quiet",
        f"--json={report}", f"--set=agent.state_dir={tmp_path / 'state'}", f"--train-set=data.shards={shards}",
        f"--train-set=run.folder={tmp_path / 'run'}",
        *options,
    ]  # fmt: skip
    code = subprocess.run(command, env=environment, timeout=170, check=False).returncode
    return code, Report.from_json(report.read_bytes())


@pytest.mark.long
def test_a_rank_is_killed_and_training_goes_on(tmp_path: Path, shards: Path) -> None:
    """Speed, time to resume and the size of a checkpoint that was read back are measured on real steps."""
    code, report = preflight(tmp_path, shards, "run_config,run_steps")
    assert code == exitcodes.OK, report.to_json()
    config, steps = ({value.measure: value.value for value in result.values} for result in report.results)
    values = {**steps, "predicted_checkpoint": config["checkpoint"]}
    assert values["resume"] > 0
    assert values["checkpoint"] == pytest.approx(values["predicted_checkpoint"], rel=0.05)
    assert min(values["write"], values["read"]) > 0
    assert values["memory"] > 10e6, "a rank has at least its libraries in memory"
    assert values["speed"] > 0
    assert not (tmp_path / "shm").exists(), "the agent of the node would take the drill for an incident"


def evaluation_sets(folder: Path, items: int) -> list[str]:
    """The settings with a set of texts and one of cloze items."""
    (folder / "texts.txt").write_text("def main() -> None:\n    print('words')\n")
    item = '{"context": "import", "choices": [" os", " banana"], "answer": 0}\n'
    (folder / "cloze.jsonl").write_text(item * items)
    return [
        f'--train-set=evaluation.perplexity={{code = "{folder}/texts.txt"}}',
        f'--train-set=evaluation.cloze={{imports = "{folder}/cloze.jsonl"}}',
    ]


def test_a_checkpoint_is_evaluated_once(tmp_path: Path, shards: Path) -> None:
    """Two steps are trained, and their checkpoint has results on every set."""
    code, report = preflight(tmp_path, shards, "run_evaluation", *evaluation_sets(tmp_path, 100))
    assert code == exitcodes.OK, report.to_json()
    [result] = report.results
    assert result.verdict is Verdict.PASS
    assert result.values[0].value > 0


def test_evaluation_sets_are_read(tmp_path: Path, shards: Path) -> None:
    """A set that is too small is a warning, one that is not there a failure; the quick profile looks no further."""
    settings = [*evaluation_sets(tmp_path, 10), "--profile=quick"]
    (tmp_path / "texts.txt").unlink()
    code, report = preflight(tmp_path, shards, "run_evaluation", *settings)
    assert code == exitcodes.FAILED
    found = "\n".join(finding.summary for finding in report.results[0].findings)
    assert "texts.txt" in found
    code, report = preflight(tmp_path, shards, "run_evaluation", *settings[1:])
    assert code == exitcodes.OK
    assert "imports has 10 items, too few" in report.results[0].findings[0].summary


def test_a_run_that_cannot_be_read_is_said_in_one_sentence(tmp_path: Path, shards: Path) -> None:
    """It counts as failed: nothing is known about it."""
    code, report = preflight(tmp_path, shards, "run_config", "--train-set=model.layrs=3")
    assert code == exitcodes.FAILED
    [result] = report.results
    assert result.verdict is Verdict.COULD_NOT_RUN
    assert "did you mean model.layers?" in result.reason


def test_data_that_is_not_there_could_not_be_tried(tmp_path: Path) -> None:
    """With the command that makes it."""
    code, report = preflight(tmp_path, tmp_path / "nothing", "run_data")
    assert code == exitcodes.FAILED
    assert "python -m opsd.trainer.data" in report.results[0].reason


def test_what_the_run_does_not_read_of_its_text_is_said(tmp_path: Path) -> None:
    """Documents that were dropped, and what is left over where shards are small beside a sequence."""
    (tmp_path / "a.jsonl").write_text('{"text": "some words of a short text"}\n{"text": null}\n' * 200)
    command = [sys.executable, "-m", "opsd.trainer.data", tmp_path / "a.jsonl", "--out", tmp_path / "shards"]
    subprocess.run([*command, "--vocab=300", "--shard-tokens=200"], check=True, capture_output=True, timeout=120)
    code, report = preflight(tmp_path, tmp_path / "shards", "run_data", "--train-set=data.sequence=128")
    assert code == exitcodes.OK, report.to_json()
    assert report.results[0].verdict is Verdict.WARN
    found = " ".join(finding.summary for finding in report.results[0].findings)
    assert "200 documents without a text dropped" in found
    assert "tokens left over at the ends of shards with sequences of 128" in found


@pytest.mark.long
def test_initial_weights_are_compared_with_transformers(tmp_path: Path, shards: Path) -> None:
    """Weights that fit are computed as transformers does; those of another model fail, before the run."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 402, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True}
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).save_pretrained(tmp_path / "qwen3")
    shape = {
        "layers": 3, "width": 32, "heads": 4, "kv_heads": 2, "head_dim": 16, "ffn": 48, "vocab": 402, "nope_every": 0,
        "qk_norm": "true", "rope_theta": 10000.0,
    }  # fmt: skip
    given = [f"--train-set=model.{name}={value}" for name, value in shape.items()]
    given += [f"--train-set=run.initial={tmp_path / 'qwen3'}", "--profile=quick"]
    code, report = preflight(tmp_path, shards, "run_initial", *given)
    [result] = report.results
    assert code == exitcodes.OK, result
    assert result.facts["layers"] == "2 of 3"
    code, report = preflight(tmp_path, shards, "run_initial", *given, "--train-set=model.qk_norm=false")
    assert code == exitcodes.FAILED
    assert "needs model.qk_norm = true" in report.results[0].findings[0].summary


# `opsd preflight network` with real processes over gloo: on the loopback interface, and in network namespaces.


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "opsd.toml").write_text("", encoding="utf-8")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("OPSD_", "SLURM_"))}
    return {**clean, "OPSD_STATE_DIR": str(tmp_path / "state"), "OPSD_CONFIG": str(tmp_path / "opsd.toml")}


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended whatever happens."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def node(environment, number: int, rendezvous: str, *options: object, before=()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "opsd", "preflight", "network", "--node", str(number), "--rendezvous", rendezvous]
    return subprocess.Popen(
        [*before, *command, *map(str, options)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def values(report: Report, check: str) -> dict[tuple[str, str], float]:
    (result,) = [result for result in report.results if result.check == check]
    return {(value.measure, value.subject): value.value for value in result.values}


@pytest.mark.long
def test_two_nodes_are_measured_and_searched(environment, port: int, started, tmp_path: Path):
    """Every collective has a bandwidth, every pattern too, and the report has the protocol of the search."""
    target = tmp_path / "report.json"
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-1]", "--json", target))
    out, err = started[1].communicate(timeout=150)
    assert started[0].wait(timeout=60) == 0
    report = Report.from_json(target.read_bytes())
    assert [result.check for result in report.results] == [
        "network_join", "network_collectives", "network_patterns", "network_search",
    ], out + err  # fmt: skip
    busbw = values(report, "network_collectives")
    assert {measure for measure, _ in busbw if measure.endswith("_busbw")} == {
        f"{name}_busbw"
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
    }
    assert all(value > 0 for value in busbw.values())
    assert len(values(report, "network_patterns")) == 4
    assert values(report, "network_search")["tests", ""] >= 2
    assert next(iter(report.results[-1].facts)) == "speed"


@pytest.mark.long
def test_a_peer_that_never_joins_is_named_and_the_others_go_on(environment, port: int, started, tmp_path: Path):
    """Exit 1 after the time for joining, with what the others measured."""
    target = tmp_path / "report.json"
    options = ("--hosts", "n[0-2]", "--join-timeout", "12", "--search", "--json", target)
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", *options))
    out, err = started[1].communicate(timeout=120)
    assert started[1].returncode == 1
    assert "n2 never joined within 12 s" in out, out + err
    assert [r.check for r in Report.from_json(target.read_bytes()).results] == ["network_join", "network_search"]


def connections(port: int) -> int:
    """How many clients the store at ``port`` has; two of them belong to the coordinator itself."""
    tables = (Path("/proc/net", name).read_text(encoding="ascii").splitlines()[1:] for name in ("tcp", "tcp6"))
    rows = [line.split() for table in tables for line in table]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def test_a_member_whose_head_dies_ends(environment, port: int, started):
    """It does not wait for ever: no longer than for a coordinator that has not come, if it was just about to join."""
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-2]", "--join-timeout", "60"))
    assert eventually(lambda: connections(port) == 3, within_s=60)
    started[1].kill()
    assert started[0].wait(timeout=120) == 1


@pytest.mark.parametrize("answers", ["nothing", "silence", "hanging up"])
def test_without_a_head_there_is_one_sentence_in_time(answers: str, environment, port: int, started):
    """Whoever is at the port: torch's client waits four times as long, for ever for silence, and prints its stack."""
    with ExitStack() as stack:
        if answers != "nothing":
            other = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        if answers == "hanging up":
            Thread(target=hang_up, args=(other,), daemon=True).start()
        member = node(environment, 1, f"127.0.0.1:{port}", "--hosts", "n[0-2]", "--join-timeout", "2")
        started.append(member)
        out, err = member.communicate(timeout=120)
    assert (member.returncode, out) == (1, "")
    (line,) = err.splitlines()
    assert line.startswith(f"opsd: 127.0.0.1:{port}: ")


def hang_up(server: socket.socket) -> None:
    with suppress(OSError):
        while True:
            server.accept()[0].close()


def test_ctrl_c_ends_a_search_with_exit_3(environment, port: int, started, tmp_path: Path):
    """What has been measured is in the report."""
    target = tmp_path / "report.json"
    for number in (1, 0):
        started.append(node(environment, number, f"127.0.0.1:{port}", "--hosts", "n[0-1]", "--json", target))
    assert eventually(lambda: connections(port) > 3, within_s=60), "the measuring processes connect as well"
    started[1].send_signal(signal.SIGINT)
    assert started[1].wait(timeout=60) == 3
    assert Report.from_json(target.read_bytes()).interrupted
    assert started[0].wait(timeout=60) == 0


@pytest.mark.long
def test_a_slowed_node_among_four_namespaces_is_named(environment, started, tmp_path: Path):
    """Traffic control takes 30 % of its bandwidth; the others are not blamed."""
    target = tmp_path / "report.json"
    try:
        with Namespaces(4, mbit=100) as cluster:
            cluster.set_speed(2, 70)
            for number in (1, 2, 3, 0):
                options = ("--hosts", "n[0-3]", "--search", "--json", target)
                started.append(node(environment, number, cluster.address(0), *options, before=cluster.command(number)))
            out, err = started[3].communicate(timeout=170)
    except NoNamespacesError as error:
        pytest.skip(str(error))
    found = [f.summary for f in Report.from_json(target.read_bytes()).results[-1].findings if f.verdict == "fail"]
    assert len(found) == 1 and found[0].startswith("node n2 is bad"), out + err
