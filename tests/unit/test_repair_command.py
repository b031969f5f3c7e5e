"""`opsd repair` and `opsd evidence` as people call them, and the archive of evidence."""

from __future__ import annotations

import io
import json
import os
import sqlite3
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from pydantic import TypeAdapter

from opsd import exitcodes
from opsd.agent.journal import Journal
from opsd.commands.evidence import evidence as evidence_command
from opsd.commands.repair import repair, tell
from opsd.config import load
from opsd.preflight.history import History
from opsd.preflight.report import Report
from opsd.repair import evidence
from opsd.repair.case_file import CaseFile
from opsd.repair.machine import RemedyError, run_command
from opsd.repair.repair_plan import Case, Remedy, closed
from opsd.runbooks.base import Culprit, Evidence
from tests.fakes.incidents import incident
from tests.fakes.webhook import Webhook

# `opsd repair` and `opsd evidence` as people call them, on a machine whose Slurm is a program of four lines.


CASE = Case("repair-1", "n1", "gpu_xid", "opsd:gpu_xid-1 gpu_xid: Xid 95", 1000.0, first=Remedy.RESET)


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings of a node without GPUs, where Slurm's commands do not exist."""
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = {"agent.node": "n1", "agent.state_dir": tmp_path / "state", "nvml.enabled": "false"}
    return [f"--set={key}={value}" for key, value in settings.items()]


def call(*arguments: str) -> Result:
    return CliRunner().invoke(repair, arguments, standalone_mode=False)


def test_without_slurm_it_is_one_sentence(options: list[str]) -> None:
    """With the fix."""
    done = CliRunner().invoke(repair, options)
    assert (done.exit_code, done.stdout) == (exitcodes.FAILED, "")
    assert done.stderr.startswith("opsd: Slurm: sinfo cannot be run")


def test_another_node_is_repaired_there(options: list[str]) -> None:
    """The remedies are local."""
    done = CliRunner().invoke(repair, ["n2", *options])
    assert "this is n1: run the command on n2" in done.stderr
    assert "this is n1: run the command on n2" in CliRunner().invoke(evidence_command, ["n2", *options]).stderr


def test_the_record_of_another_node_is_no_repair_of_this_one(options: list[str], tmp_path: Path) -> None:
    """A disk was copied with the state folder on it."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(replace(CASE, node="n2"))
    for how in ([], ["--act"], ["--ordered"]):
        done = CliRunner().invoke(repair, [*how, *options])
        assert (done.exit_code, done.stdout) == (exitcodes.FAILED, "")
        assert "case.json is a repair of n2, and this is n1: move it away" in done.stderr
    cases.keep(closed(replace(CASE, node="n2"), "returned", "", 1000.0))
    assert (cases.recent("n1", 1001.0), cases.recent("n2", 1001.0)) == (0, 1)
    assert cases.recent("n2", 999.0) == 0, "opened in the future: the clock was set"
    assert cases.recent("n2", 1001.0, since=1000.5) == 0, "its hardware was replaced since"


def test_an_order_counts_only_where_the_policy_says_so(options: list[str], tmp_path: Path) -> None:
    """Otherwise it is dropped, or the unit would start again and again."""
    cases = CaseFile(tmp_path / "state")
    cases.order()
    done = call("--ordered", *options)
    assert (done.return_value, "policy.repair is observe" in done.output) == (exitcodes.OK, True)
    assert not cases.ordered
    acting = call("--ordered", "--set=policy.repair=act", *options)
    assert (acting.return_value, "no repair was ordered" in acting.output) == (exitcodes.OK, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="repairs are root's")
def test_a_policy_that_was_taken_back_ends_its_repairs(options: list[str], tmp_path: Path) -> None:
    """After the reboot as well; one that a person has begun goes on."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(CASE)
    assert call("--ordered", *options).return_value == exitcodes.FAILED
    assert cases.current() is None
    assert [case.verdict for case in cases.past()] == ["policy.repair is observe now"]
    by_hand = replace(CASE, id="repair-2", by_hand=True, end="returned", ended_at=2000.0)
    (tmp_path / "state/repair/case.json").write_text(TypeAdapter(Case).dump_json(by_hand).decode())
    assert call("--ordered", *options).return_value == exitcodes.OK


def test_an_order_stays_while_slurm_does_not_answer(options: list[str], tmp_path: Path) -> None:
    """The unit tries again."""
    CaseFile(tmp_path / "state").order()
    done = CliRunner().invoke(repair, ["--ordered", "--set=policy.repair=act", *options])
    assert done.exit_code == exitcodes.FAILED
    assert CaseFile(tmp_path / "state").ordered


def test_a_repair_under_way_is_shown(options: list[str], tmp_path: Path) -> None:
    """As text and as JSON, also while Slurm does not answer."""
    CaseFile(tmp_path / "state").keep(CASE)
    assert call(*options).output == "n1: wait; Slurm does not answer\n"
    shown = json.loads(call("--json", *options).output)
    assert (shown["under_way"], shown["case"]["id"], shown["next"]["do"]) == (True, "repair-1", "wait")
    CaseFile(tmp_path / "state").keep(replace(CASE, paused="maintenance: new firmware"))
    assert call(*options).output == "n1: wait; maintenance: new firmware\n"


def test_a_record_that_cannot_be_read_is_one_sentence(options: list[str], tmp_path: Path) -> None:
    """With the fix."""
    (tmp_path / "state/repair").mkdir(parents=True)
    (tmp_path / "state/repair/case.json").write_text("{}")
    done = CliRunner().invoke(repair, options)
    assert done.stderr.endswith("it is no record of this opsd, or not root's); move it away to begin a new repair\n")


def test_evidence_is_written_where_nothing_is_installed(options: list[str], tmp_path: Path) -> None:
    """Its name and size, for people and programs; a folder that does not exist is one sentence."""
    out = tmp_path / "out.tar.gz"
    made = CliRunner().invoke(evidence_command, ["--json", "--out", str(out), *options])
    assert json.loads(made.output)["bytes"] == out.stat().st_size
    refused = CliRunner().invoke(evidence_command, ["--out", str(tmp_path / "none/out.tar.gz"), *options])
    assert (refused.exit_code, "cannot be written: No such file" in refused.stderr) == (exitcodes.FAILED, True)


def test_evidence_goes_to_a_pipe(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not into a file of the name "-", nor beside a JSON object."""
    monkeypatch.chdir(tmp_path)
    made = CliRunner().invoke(evidence_command, ["--out", "-", *options])
    with tarfile.open(fileobj=io.BytesIO(made.stdout_bytes)) as archive:
        assert any(name.endswith("/index.json") for name in archive.getnames())
    assert not (tmp_path / "-").exists()
    refused = CliRunner().invoke(evidence_command, ["--out", "-", "--json", *options])
    assert (refused.exit_code, "without --json" in refused.stderr) == (exitcodes.USAGE, True)


def test_people_are_told_how_it_has_ended(tmp_path: Path) -> None:
    """Where they are told of incidents, and not in a time for which that is muted."""
    case = closed(CASE, "rma", "3 attempts without success", 2000.0, "/evidence.tar.gz")
    webhook = Webhook()
    try:
        told = load(None, (f"notify.webhook={webhook.url}", f"agent.state_dir={tmp_path}"))
        tell(told, case)
        muted = 'policy.mute=[{weekly = "mon 00:00 - mon 00:00"}]'
        tell(load(None, (f"notify.webhook={webhook.url}", muted)), case)
    finally:
        webhook.shutdown()
        webhook.server_close()
    (post,) = webhook.posts
    assert "n1: has to be replaced: 3 attempts without success" in json.dumps(post)


def test_a_record_that_another_user_has_written_decides_nothing(options: list[str], tmp_path: Path) -> None:
    """Nor one that is no file: root would wait for a pipe, and follow a link."""
    cases = CaseFile(tmp_path / "state")
    cases.keep(closed(CASE, "returned", "", 1000.0))
    cases.keep(CASE)
    for path in (cases.folder / "case.json", cases.folder / f"{CASE.id}.json"):
        os.chown(path, 12345, 12345)
    os.mkfifo(cases.folder / "repair-20990101T000000.json")
    assert cases.past() == []
    assert "or not root's); move it away" in CliRunner().invoke(repair, ["--act", *options]).stderr


# The archive of evidence: what is in it, how much, and what is left out.


def test_an_archive_of_evidence_is_bounded_and_has_no_secrets(tmp_path: Path) -> None:
    """Long parts keep their end; what is missing stands in the index; names come from opsd alone."""

    def run(argv: Sequence[str], _deadline_s: float) -> str:
        if argv[0] == "dmesg":
            return "x" * (evidence.PART_BYTES + 10) + "\nWANDB_API_KEY=abc123 and the end"
        if argv[0] == "scontrol":
            return "Reason=login with https://ann:hunter2@host Authorization: Bearer xyz"
        raise RemedyError(f"{argv[0]} cannot be run: No such file or directory")

    sources = evidence.Sources("../n 1", tmp_path, tmp_path / "preflight.sqlite", run=run, nvidia_report="none")
    path = evidence.make(sources, 1_763_700_000.0)
    assert path == tmp_path / "evidence" / "evidence-_n_1-20251121T044000Z.tar.gz"
    assert path.stat().st_mode & 0o077 == 0
    with tarfile.open(path) as archive:
        parts = {Path(member.name).name: archive.extractfile(member) for member in archive}
        texts = {name: file.read().decode() for name, file in parts.items() if file is not None}
        assert all(member.isreg() and not member.name.startswith(("/", ".")) for member in archive)
    assert len(texts["kernel-ring.txt"]) == evidence.PART_BYTES
    assert texts["kernel-ring.txt"].endswith("WANDB_API_KEY=(left out) and the end")
    assert "hunter2" not in texts["slurm-node.txt"]
    assert "xyz" not in texts["slurm-node.txt"]
    index = json.loads(texts["index.json"])["parts"]
    assert index["kernel-ring.txt"]["cut"] is True
    assert index["nvidia-smi.txt"] == {"missing": "nvidia-smi cannot be run: No such file or directory"}
    assert index["nvidia-bug-report.log.gz"] == {"missing": "none is not installed"}


def test_a_program_s_own_report_is_taken_along(tmp_path: Path) -> None:
    """As it is, compressed by its own program."""
    program = tmp_path / "report"
    program.write_text('#!/bin/sh\n[ "$1 $2" = "--safe-mode --output-file" ] && echo all >"$3.gz"\n')
    program.chmod(0o755)
    sources = evidence.Sources("n1", tmp_path, tmp_path / "preflight.sqlite", nvidia_report=str(program))

    def run(argv: Sequence[str], deadline_s: float) -> str:
        return run_command(argv, deadline_s) if argv[0] == str(program) else ""

    path = evidence.make(evidence.Sources(**{**_fields(sources), "run": run}), 0.0, tmp_path / "out.tar.gz")
    with tarfile.open(path) as archive:
        (name,) = [name for name in archive.getnames() if "bug-report" in name]
        file = archive.extractfile(name)
        assert file is not None
        assert file.read() == b"all\n"


def _fields(sources: evidence.Sources) -> dict[str, object]:
    return {name: getattr(sources, name) for name in ("node", "state_dir", "preflights", "library", "nvidia_report")}


def test_only_the_newest_archives_and_cases_are_kept(tmp_path: Path) -> None:
    """Nodes that fail for months fill no disk."""
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda _argv, _s: "", nvidia_report="none")
    for number in range(evidence.KEPT + 3):
        path = evidence.make(sources, 1e9 + number)
        os.utime(path, (number, number))
    assert len([*(tmp_path / "evidence").glob("*.tar.gz")]) == evidence.KEPT
    assert CaseFile(tmp_path).past() == []


SECRETS = pytest.mark.parametrize(
    "text",
    [
        '{"log": "{\\"password\\": \\"hunter2\\"}"}',
        'token: "three words hunter2"',
        "PASSWORD=a;hunter2",
        "mount.cifs --password hunter2 //server",
        '{"Authorization": "Bearer hunter2"}',
        "Authorization: hunter2",
        "https://hunter2@host/",
        "private_key=hunter2",
        "SLURM_JWT=hunter2",
        "curl -u ann:hunter2 https://host/",
        "curl --user ann:hunter2 https://host/",
        "curl -sfuann:hunter2 https://host/",
        "curl --proxy-user=ann:hunter2 https://host/",
        "Cookie: session=hunter2; other=hunter2",
        "Set-Cookie: id=hunter2; HttpOnly",
        '{"cookie": "session=hunter2"}',
        "https://account.blob.core.windows.net/c/b?sv=2022&sig=hunter2%3D&se=2026",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Signature=hunter2&X-Amz-Expires=60",
        "https://bucket.s3.amazonaws.com/key?X-Amz-Credential=hunter2&x=1",
        "https://storage.googleapis.com/b/o?X-Goog-Signature=hunter2",
        "MYSQL_PWD=hunter2",
        "SSHPASS=hunter2 sshpass -e ssh",
        "CIFS: mount of //server with pass=hunter2,vers=3",
        "python train.py --wandb-key hunter2",
        "python train.py --wandb_key=hunter2",
        '["python", "train.py", "--hf-token", "hunter2"]',
        '{"stack": "[\\"--hf-token\\", \\"hunter2\\"]"}',
        "huggingface-cli login hf_hunter2hunter2hunter2hunter2",
        "glpat-hunter2hunter2hunter2",
        "sent eyJhunter2hunter2hunter2.hunter2.hunter2_hunter2",
        "NGC_KEY is nvapi-hunter2hunter2hunter2",
        "docker login dckr_pat_hunter2hunter2hunter2",
        "slack xoxb-1234567890-hunter2hunter2",
        "https://hooks.slack.com/services/T00000000/B00000000/hunter2",
        "https://discord.com/api/webhooks/1234/hunter2",
        "ipmitool -I lanplus -H n1-bmc -U admin -P hunter2 chassis status",
        "sshpass -phunter2 ssh n1-bmc",
        "mysql -u root -phunter2 -h db1",
        "mysqldump --all-databases -phunter2",
        "DefaultEndpointsProtocol=https;AccountName=a;AccountKey=hunter2;EndpointSuffix=x",
        "nslcd: bindpw: hunter2",
        "sent bearer hunter2hunter2hunter2",
        "https://ann:hun@ter2hunter2@host/",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----",
        "-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128-CBC,01\n\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nhunter2\n-----END PGP PRIVATE KEY BLOCK-----",
        "2026-01-01 n1 -----BEGIN PRIVATE KEY-----\n2026-01-01 n1 hunter2\n",
        "SSH_KEY=-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2\n-----END OPENSSH PRIVATE KEY-----",
        'private_key: "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----"',
        '"password":"a\\"hunter2"',
        "machine github.com login ann password hunter2",
        "the BMC's password is hunter2",
        "password:          hunter2",
        "PASSWORD => hunter2",
        "authorization=Basic hunter2",
        "Server=db1;Uid=sa;Pwd=hunter2;",
        "//registry.npmjs.org/:_auth=hunter2",
        "wpa: psk=hunter2",
        "Command line: BOOT_IMAGE=/vmlinuz netroot=iscsi:ann:hunter2@10.0.0.1::3260::iqn",
        "ghr_hunter2hunter2hunter2",
        "glrt-hunter2hunter2hunter2",
        "hvs.hunter2hunter2hunter2",
        "wandb_v1_hunter2hunter2hunter2",
        "xapp-1-hunter2hunter2hunter2",
    ],
)


def test_what_only_looks_like_a_secret_stays() -> None:
    """Verdicts of checks, addresses and keys of hashes are what a vendor needs."""
    text = '{"passed": true, "verdict": "pass", "task-0": 1} iommu: bypass: on\nkey 0x3 of gpu 0, disk-sda, skew 3'
    text += "\nipmitool sel: Power Supply; a bearer of news; webhook; ring-p 4\nhttps://host/a@b ssh://n1 see n2@rack"
    assert evidence.without_secrets(text) == text


@SECRETS
def test_secrets_are_left_out_however_they_are_quoted(text: str) -> None:
    """Incidents are JSON that quotes logs, which may quote JSON themselves."""
    assert "hunter2" not in evidence.without_secrets(text)


def test_of_too_many_incidents_the_newest_are_kept(tmp_path: Path) -> None:
    """A part that is too long loses its beginning."""
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("CREATE TABLE incidents (document TEXT, opened_at REAL)")
        rows = [(json.dumps({"id": at, "text": "x" * 20_000}), at) for at in range(220)]
        database.executemany("INSERT INTO incidents VALUES (?, ?)", rows)
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda *_: "", nvidia_report="none")
    with tarfile.open(evidence.make(sources, 1_763_700_000.0)) as archive:
        member = next(one for one in archive if one.name.endswith("/incidents.json"))
        file = archive.extractfile(member)
        assert file is not None
        assert '"id": 219' in file.read().decode()


@pytest.mark.parametrize("kind", ["pipe", "folder"])
def test_an_archive_takes_the_place_of_files_only(tmp_path: Path, kind: str) -> None:
    """Root could otherwise rename one over /dev/null."""
    out = tmp_path / "out"
    os.mkfifo(out) if kind == "pipe" else out.mkdir()
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda *_: "", nvidia_report="none")
    with pytest.raises(OSError, match="not a regular file"):
        evidence.make(sources, 1_763_700_000.0, out)
    assert not out.is_file()
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


LINE = "python train.py --db hunter2 -phunter2 hunter2"


def test_no_command_line_of_a_process_is_in_the_archive(tmp_path: Path) -> None:
    """Of nvidia-smi, and of audit records in the kernel's log: the program is named, what is passed to it is not."""
    smi = f"        Process ID                        : 42\n            Name                          : {LINE}\n"
    script = f"python -c import os\n    db = {LINE}\n\nclass A:"  # lines of an argument
    smi = f"{smi.replace(LINE, script)}            Used GPU Memory               : 80 MiB\n    Capabilities\n{smi}"
    audit = (
        f'2026-01-01T00:00:00 audit: type=1309 audit(1.2:3): argc=4 a0="mysql" a1="{LINE}" a2="audit(1"\nNVRM: Xid 79'
    )
    said = {"nvidia-smi": f"GPU 0\n    Product Name : NVIDIA\n{smi}", "dmesg": audit, "journalctl": audit}
    asked: list[Sequence[str]] = []

    def run(argv: Sequence[str], _deadline_s: float) -> str:
        asked.append(argv)
        return said.get(argv[0], "")

    sources = evidence.Sources("n1", tmp_path, tmp_path / "preflight.sqlite", run=run, nvidia_report="none")
    texts = unpacked(evidence.make(sources, 0.0))
    assert [name for name, text in texts.items() if "hunter2" in text] == []
    assert "Name                          : python\n            Used GPU Memory" in texts["nvidia-smi.txt"]
    assert texts["nvidia-smi.txt"].endswith(
        "Capabilities\n" + smi.rpartition("Capabilities\n")[2].partition(" train")[0] + "\n"
    )
    assert all({"_TRANSPORT=kernel", "SYSLOG_FACILITY=0"} <= {*argv} for argv in asked if argv[0] == "journalctl")
    assert "NVRM: Xid 79" in texts["kernel.txt"]


def test_no_word_of_users_programs_is_in_the_archive(tmp_path: Path) -> None:
    """Of the journal's incidents: what the kernel and the driver say is, and where and when the others were."""
    xid = incident(
        "a",
        kind="gpu_xid",
        summary="GPU 0: Xid 79",
        evidence=(Evidence("Xid 79", "kmsg", 1.0), Evidence(LINE, "rank log", 1.0)),
    )
    crash = incident(
        "b", kind="rank_crash", key=LINE, summary=LINE, verdict=LINE, evidence=(Evidence(LINE, "rank log", 1.0),),
        culprit=Culprit("user code", "n1", detail=LINE), data={"line": LINE}, run=LINE, job=LINE,
        actions=({"verb": "notify", "target": LINE, "reason": LINE, "at": 1.0, "outcome": "done", "detail": LINE},),
    )  # fmt: skip
    unknown = incident("c", kind="of another release", summary=LINE)
    quoting = incident(
        "d",
        kind="fabric_manager",
        summary=f"the fabric does not work: {LINE}",
        evidence=(Evidence(LINE, "launcher", 1.0),),
    )
    journal = Journal(tmp_path, lambda _problem: None)
    journal.open(60.0)
    for one in (xid, crash, unknown, quoting):
        journal.incident(one)
    journal.close(60.0)
    sources = evidence.Sources("n1", tmp_path, tmp_path / "none", run=lambda _argv, _s: "", nvidia_report="none")
    text = unpacked(evidence.make(sources, 0.0))["incidents.json"]
    assert "hunter2" not in text
    told = {document["id"]: document for document in json.loads(text)}
    assert (told["a"]["summary"], [fact["text"] for fact in told["a"]["evidence"]]) == ("GPU 0: Xid 79", ["Xid 79"])
    assert (told["b"]["kind"], told["b"]["culprit"]["node"], [a["verb"] for a in told["b"]["actions"]]) == (
        "rank_crash", "n1", ["notify"],
    )  # fmt: skip
    assert told["c"]["kind"] == "of another release"


def unpacked(archive: Path) -> dict[str, str]:
    """The texts in an archive by their names."""
    with tarfile.open(archive) as found:
        parts = {Path(member.name).name: found.extractfile(member) for member in found}
        return {name: file.read().decode() for name, file in parts.items() if file is not None}


def test_a_record_that_cannot_be_read_hides_none_of_the_others(tmp_path: Path) -> None:
    """Of a later release, or damaged: what is left is evidence all the same."""
    cases = CaseFile(tmp_path)
    cases.keep(
        closed(Case("repair-1", "n1", "gpu_xid", "opsd:a", 1.0, first=Remedy.RESET), "rma", "nothing helped", 2.0)
    )
    (cases.folder / "case.json").write_text('{"id": "of a later release"}')
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("CREATE TABLE incidents (document TEXT, opened_at REAL)")
        rows = [('{"id": "good"}', 1.0), ("{", 2.0), ("[]", 3.0), ('{"evidence": 1}', 4.0)]
        database.executemany("INSERT INTO incidents VALUES (?, ?)", [*rows, (None, 5.0)])
        database.execute("INSERT INTO incidents VALUES (CAST(X'7b22ff' AS TEXT), 6.0)")
    history = History(tmp_path / "preflight.sqlite")
    for started in (1.0, 2.0):
        history.record(Report("n1", "quick", "1", started, started, ()))
    with sqlite3.connect(history.path) as database:
        database.execute("UPDATE runs SET report = '{}' WHERE started = 2.0")
    sources = evidence.Sources("n1", tmp_path, history.path, run=lambda *_: "", nvidia_report="none")
    texts = unpacked(evidence.make(sources, 0.0))
    told = {name: json.loads(texts[f"{name}.json"]) for name in ("repairs", "incidents", "preflights")}
    assert [record["id"] for record in told["repairs"][:-1]] == ["repair-1"]
    assert told["incidents"][0]["id"] == "good"
    assert told["preflights"][0]["started"] == 1.0
    unreadable = [*told["repairs"][1:], *told["incidents"][1:], *told["preflights"][1:]]
    assert (len(unreadable), all([*record] == ["cannot be read"] for record in unreadable)) == (7, True)
