"""What the test of the tutorials takes for equal, and what it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.tutorial import Shell, Step, fits, play, steps


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        ("loss 2.34 after 12.1 s", "loss 1.99 after  7.4 s", True),
        ("0 failed, 1200 passed", "0 failed, 900 passed", True),
        ("0 failed", "1 failed", False),
        ("a\n...\nd", "a\nb\nc\nd", True),
        ("a\n...\nd", "a\nb\nc", False),
        ("a", "a\nb", False),
        ("in ... s", "in a few s", True),
        ("2026-11-23 05:10", "2027-01-02 19:44:05", True),
        ("│ productive │ 34.18 │", "┃ productive ┃ 1.5 ┃", True),
        ("(a|b)*", "(a|b)*", True),
        ("a.c", "abc", False),
    ],
)
def test_what_is_printed_is_compared_but_for_what_varies(shown: str, printed: str, equal: bool) -> None:
    """Numbers that are measured may differ; counts and words may not."""
    assert fits(shown.splitlines(), printed) is equal


def test_a_page_is_run_in_one_shell(tmp_path: Path) -> None:
    """Folders and variables stay; a failure that the page does not show is one, and so is other output."""
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n```console\n$ mkdir a && cd a\n$ cat > f <<'END'\n> x 1.5\n> END\n$ cat f\nx 2.5\n$ false\n[1]\n```\n"
    )
    assert [*steps(page)][1:3] == [Step("cat > f <<'END'\nx 1.5\nEND", ()), Step("cat f", ("x 2.5",))]
    with Shell(tmp_path, {}) as shell:
        play(page, shell, 20)
        for wrong in ("$ cat f\ny 2.5", "$ false", "$ true\n[1]"):
            page.write_text(f"```console\n{wrong}\n```\n")
            with pytest.raises(AssertionError):
                play(page, shell, 20)


def test_a_block_that_no_test_runs_is_refused(tmp_path: Path) -> None:
    """Commands in another kind of block would go unnoticed."""
    (tmp_path / "page.md").write_text("```\n$ true\n```\n")
    with pytest.raises(AssertionError, match="run by no test"):
        list(steps(tmp_path / "page.md"))


def test_a_command_that_never_ends_is_named_and_ended(tmp_path: Path) -> None:
    """What the page waits for in vain is what its author has to know."""
    page = tmp_path / "page.md"
    page.write_text("```console\n$ echo so far\nso far\n$ until test -e never; do sleep 0.1; done\n```\n")
    with pytest.raises(TimeoutError, match="until test -e never"), Shell(tmp_path, {}) as shell:
        play(page, shell, 1)
