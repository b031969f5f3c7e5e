"""``opsd deploy``: the files that put opsd to work, as they came with this version."""

from __future__ import annotations

import filecmp
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import click

from opsd.commands.options import Group, option

FOLDER = Path(__file__).parents[1] / "deploy"


@click.group(cls=Group)
def deploy() -> None:
    """List, show or copy what runs opsd: systemd units, batch scripts, rules, Alertmanager, Grafana, Ansible, deb."""


@deploy.command("list")
@option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def list_files(as_json: bool) -> None:
    """One line for each file."""
    names = [str(path.relative_to(FOLDER)) for path in _files(FOLDER)]
    click.echo(json.dumps(names, indent=1) if as_json else "\n".join(names))


@deploy.command()
@click.argument("name")
def show(name: str) -> None:
    """Print the file NAME, for instance slurm/train-spares.sbatch."""
    path = _find(name)
    if path.is_dir():
        raise click.UsageError(f"{name} is a folder; `opsd deploy copy TARGET {name}` copies it")
    click.echo(path.read_text(encoding="utf-8"), nl=False)


@deploy.command()
@click.argument("target", type=click.Path(path_type=Path, file_okay=False))
@click.argument("names", nargs=-1)
@option("--overwrite", is_flag=True, help="Replace files that are there and differ.")
def copy(target: Path, names: tuple[str, ...], overwrite: bool) -> None:
    """Copy NAMES, files or folders, into the folder TARGET; everything if no name is given."""
    pairs = [(path, target / path.relative_to(FOLDER)) for name in names or (".",) for path in _files(_find(name))]
    changed = [
        str(copied) for path, copied in pairs if copied.exists() and not filecmp.cmp(path, copied, shallow=False)
    ]
    if changed and not overwrite:
        raise click.UsageError(f"{', '.join(changed)}: there and different, nothing was copied; see --overwrite")
    try:
        for path, copied in pairs:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
            copied.chmod(path.stat().st_mode & 0o777 | 0o200)  # the package's folder may be read-only
    except OSError as error:
        raise click.UsageError(f"{error.filename}: cannot be written: {error.strerror}") from error
    click.echo(f"{len(pairs)} files in {target}")


def _find(name: str) -> Path:
    """The file or folder ``name`` below the folder. Raises click.UsageError for what is not part of it."""
    path = (FOLDER / name).resolve()
    if not path.exists() or not path.is_relative_to(FOLDER.resolve()):
        raise click.UsageError(f"there is no {name}; `opsd deploy list` names what there is")
    return FOLDER / path.relative_to(FOLDER.resolve())


def _files(path: Path) -> Iterable[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
