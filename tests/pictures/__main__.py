"""``python -m tests.pictures FOLDER``: make all pictures of the documentation but that of the demo.

The boards need half an hour of history. Uses npm, chromium, Prometheus and Alertmanager.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from opsd.agent.web.server import Server
from opsd.dependents import nothing_left
from opsd.simulated.gpus import NoCompilerError
from opsd.stack.world import StackError
from tests.fakes.collectors import SILENT
from tests.pictures import boards, pages, run, study, terminal
from tests.pictures.browser import PictureError
from tests.pictures.cluster import cluster, story

CACHE = Path(__file__).parents[2] / ".npm-boards"
SETTLE_S = 60.0
PREFLIGHT_S, COMMAND_S = 300.0, 60.0


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--minutes", default=35.0, help="How long the cluster runs before its pictures are taken.")
def main(folder: Path, minutes: float) -> None:
    """Make the pictures in FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with nothing_left("opsd-pictures-") as mine:
            work = mine.temporary("work-")
            boards.bundle(CACHE)
            for name in ("cluster", "run", "study"):
                (work / name).mkdir()
            with cluster(work / "cluster") as (stack, nodes):
                click.echo(f"the cluster runs for {minutes:g} minutes")
                story(nodes, minutes * 60)
                of_cluster(stack.prometheus, stack.agent, minutes * 60, work, folder)
            run.pictures(work / "run", folder)
            study.pictures(work / "study", folder)
            told = terminal.run(["preflight", "--profile", "quick"], work, {}, PREFLIGHT_S)
            terminal.draw("opsd preflight --profile quick", told, folder / "preflight.svg", work)
    except (PictureError, StackError, NoCompilerError) as error:
        click.echo(f"opsd: {error}", err=True)
        sys.exit(1)


def of_cluster(prometheus: str, agent: str, seconds: float, work: Path, folder: Path) -> None:
    """The pictures of a cluster that runs."""
    server = Server("127.0.0.1:0", SILENT)
    server.start(pages.fleet())
    try:
        taken = pages.pictures(agent, f"http://{server.address}", folder)
    finally:
        server.close()
    for name, arguments in (("status", ["status"]), ("top", ["top", "--once"])):
        told = terminal.run([*arguments, "--url", agent], work, {}, COMMAND_S)
        terminal.draw(" ".join(("opsd", *arguments)), told, folder / f"{name}.svg", work)
    for file in (*taken, *boards.pictures(prometheus, seconds, CACHE, folder, work)):
        click.echo(f"wrote {file}")


if __name__ == "__main__":
    main()
