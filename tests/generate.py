"""All that is made from the code: ``python -m tests.generate`` writes it, a test compares it."""

from __future__ import annotations

from pathlib import Path

from opsd import config
from opsd.commands.metrics import catalogue
from opsd.dashboards import boards
from tests import manpages, reference, schemas

ROOT = Path(__file__).resolve().parents[1]


def rendered() -> dict[Path, str]:
    """File and content of everything that is generated."""
    return {
        **{path: boards.in_order(path.read_text("utf-8")) for path in boards.FOLDER.glob("*.json")},
        **reference.rendered(),
        **manpages.rendered(),
        **schemas.rendered(),
        ROOT / "deploy/opsd.toml.example": config.template(),
        ROOT / "tests/golden/metrics.txt": "\n".join(_interface()) + "\n",
    }


def _interface() -> list[str]:
    """What dashboards, alerts and runbooks are written against: one line a metric, sorted by name.

    A renamed metric breaks somebody's alert without a sound, so that the difference is for review.
    """
    return sorted(f"{m.name} {m.kind} {m.unit or '-'} {','.join(m.labels) or '-'}" for _, m in catalogue())


def outdated() -> dict[Path, str]:
    """Files that are missing or differ, with what should stand there."""
    return {
        path: text for path, text in rendered().items() if not path.exists() or path.read_text(encoding="utf-8") != text
    }


def leftovers() -> list[Path]:
    """Files that were made from something that is gone."""
    return [*reference.leftovers(), *manpages.leftovers()]


def _shown(path: Path) -> Path:
    """Where it is in the repository: git takes no path through the links in ``opsd/``."""
    return path.resolve().relative_to(ROOT)


def main() -> None:
    """Write what differs, remove what is left over."""
    for path, text in outdated().items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {_shown(path)}")
    for path in leftovers():
        path.unlink()
        print(f"removed {_shown(path)}")


if __name__ == "__main__":
    main()
