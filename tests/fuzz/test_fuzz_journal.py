"""Whatever is found in the journal's file: the agent runs, and what it cannot read is set aside."""

from __future__ import annotations

import itertools
import json
import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from opsd.agent.journal import Journal
from opsd.agent.policy import PastAction
from opsd.agent.store import RecordError, Store, from_json, to_json
from tests.fakes.fuzzing import AMOUNTS, changed, encoded, fuzz, json_lines, numbers, texts
from tests.fakes.incidents import incident

DOCUMENT = json.loads(to_json(incident("a")))
COLUMNS = {"incidents": ("id", "kind", "opened_at", "resolved_at", "document"), "actions": ("at", "kind", "target")}
SEEDS: tuple[bytes, ...] = (
    b"[" * 100_000,
    encoded({**DOCUMENT, "opened_at": 10**400}),
    encoded({**DOCUMENT, "summary": "\ud800"}),
    encoded({**DOCUMENT, "data": {"gpu": float("inf")}}),
    encoded({**DOCUMENT, "attempts": 1e308}),
)


@AMOUNTS
def test_no_document_is_a_bug(amount: int) -> None:
    """It is an incident that can be written again, or refused."""

    def read(content: bytes) -> None:
        try:
            found = from_json(content.decode(errors="replace"))
        except RecordError:
            return
        assert from_json(to_json(found)) == found or "NaN" in to_json(found)

    fuzz(read, json_lines(DOCUMENT) | changed(to_json(incident("a")).encode()), amount, SEEDS)


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A journal with two incidents and an action, as an agent leaves it."""
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, lambda problem: None)
    journal.open(30.0)
    for one in (incident("a"), incident("b", resolved_at=time.time())):
        journal.incident(one)
    journal.action("a", PastAction("trouble", "notify", "r", time.time()))
    journal.close(30.0)
    (file,) = folder.glob("journal.db")
    return file


class Journals:
    """Copies of a journal, each in a state folder of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._names = folder, itertools.count()

    def survives(self, content: bytes, *statements: tuple[str, tuple[Any, ...]]) -> None:
        """An agent starts with a file of this ``content`` after these ``statements``, writes, and knows it again."""
        folder = self._folder / str(next(self._names))
        folder.mkdir(mode=0o700)
        path = folder / "journal.sqlite"
        path.write_bytes(content)
        if statements:
            with closing(sqlite3.connect(path)) as database, database:
                for statement, values in statements:
                    database.execute(statement, values)
        now = time.time()
        with Store(path, now) as store:
            store.load(now)
            assert store.write([incident("z")], []) == (0, [])
        with Store(path, now) as store:
            known = store.load(now)
        assert "z" in {one.id for one in known.current}
        shutil.rmtree(folder)


@AMOUNTS
def test_no_file_is_a_bug(amount: int, journal: Path, memory_folder: Path) -> None:
    """Damaged anywhere, cut off, or no database at all."""
    content = journal.read_bytes()
    fuzz(Journals(memory_folder).survives, changed(content), amount, [b"", content[:100], b"SQLite format 3\0"])


@AMOUNTS
def test_no_row_is_a_bug(amount: int, journal: Path, memory_folder: Path) -> None:
    """SQLite keeps any value in any column."""
    content, journals = journal.read_bytes(), Journals(memory_folder)
    places = [(table, column) for table, columns in COLUMNS.items() for column in columns]
    stored = numbers.filter(lambda n: not isinstance(n, int) or abs(n) < 2**63) | st.binary(max_size=20) | st.none()
    written = texts.map(lambda text: text.encode(errors="replace").decode())
    rows = st.lists(st.tuples(st.sampled_from(places), stored | written), min_size=1, max_size=3)

    def look(changes: list[tuple[tuple[str, str], Any]]) -> None:
        statements = [(f"UPDATE OR IGNORE {table} SET {column} = ?", (value,)) for (table, column), value in changes]
        journals.survives(content, *statements)

    fuzz(look, rows, amount)
