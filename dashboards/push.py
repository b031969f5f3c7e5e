"""Write the boards into a Grafana. Boards and folder have fixed uids, so that a second push changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any, Literal

from grafana_client.api import GrafanaApi
from grafana_client.client import GrafanaClientError, GrafanaException, GrafanaTimeoutError, GrafanaUnauthorizedError

from opsd.dashboards.boards import NAMES, OF_GRAFANA, text_of

FOLDER_UID, FOLDER_TITLE = "opsd", "opsd"
OLDEST = 11
"""The oldest Grafana that reads schema 42, the boards' version."""
TIMEOUT_S = 10.0

Change = Literal["new", "changed", "same"]


class PushError(Exception):
    """The boards could not be written to Grafana; the message says why in one sentence."""


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was done with a board, or would be in a dry run; ``diff`` is what changes in it."""

    uid: str
    change: Change
    diff: str = ""


class Grafana:
    """A Grafana at ``url``, and the token of a service account that may write dashboards and folders."""

    def __init__(self, url: str, token: str) -> None:
        self._url = url
        try:
            self._api = GrafanaApi.from_url(url, token, timeout=TIMEOUT_S)
        except ValueError as error:
            raise PushError(f"{url} is no address of a Grafana: {error}") from error

    def push(self, *, dry_run: bool = False) -> Iterator[Pushed]:
        """Write the boards that differ; with ``dry_run`` only report them. Raises PushError."""
        self._check_version()
        if not self._has_folder() and not dry_run:
            self._call(self._api.folder.create_folder, FOLDER_TITLE, FOLDER_UID)
        for name in NAMES:
            board = json.loads(text_of(name))
            pushed = self._compare(board)
            if pushed.change != "same" and not dry_run:
                body = {
                    "dashboard": board,
                    "folderUid": FOLDER_UID,
                    "overwrite": True,
                    "message": "opsd dashboards push",
                }
                self._call(self._api.dashboard.update_dashboard, body)
            yield pushed

    def _check_version(self) -> None:
        said = self._call(self._api.health.check)
        version = str(said.get("version", "")) if isinstance(said, Mapping) else ""
        major = version.partition(".")[0]
        if not major.isdigit():
            raise PushError(f"{self._url} does not answer like a Grafana; is the address right?")
        if int(major) < OLDEST:
            raise PushError(f"{self._url} is Grafana {version}; the boards need Grafana {OLDEST} or newer")

    def _has_folder(self) -> bool:
        return self._find(self._api.folder.get_folder, FOLDER_UID) is not None

    def _compare(self, board: Mapping[str, Any]) -> Pushed:
        uid = str(board["uid"])
        found = self._find(self._api.dashboard.get_dashboard, uid)
        if found is None:
            return Pushed(uid, "new")
        there = {key: value for key, value in found["dashboard"].items() if key not in OF_GRAFANA}
        if there == board and found["meta"].get("folderUid") == FOLDER_UID:
            return Pushed(uid, "same")
        lines = unified_diff(_lines(there), _lines(board), f"{uid} in Grafana", f"{uid} here", n=1, lineterm="")
        return Pushed(uid, "changed", "\n".join(lines))

    def _find(self, get: Any, uid: str) -> Any:
        """The result of ``get``, None if nothing has this uid."""
        try:
            return self._call(get, uid)
        except _NotFound:
            return None

    def _call(self, method: Any, *arguments: object) -> Any:
        try:
            return method(*arguments)
        except GrafanaUnauthorizedError as error:
            raise PushError(f"{self._url} does not know this token (401); make one for a service account") from error
        except GrafanaClientError as error:
            raise self._refused(error) from error
        except GrafanaTimeoutError as error:
            raise PushError(f"{self._url} has not answered within {TIMEOUT_S:g} s") from error
        except GrafanaException as error:
            raise PushError(f"{self._url} failed: {error}") from error
        except (OSError, ValueError) as error:  # from the HTTP library: no connection, no JSON
            raise PushError(
                f"{self._url} does not answer like a Grafana ({type(error).__name__}); is it up?"
            ) from error

    def _refused(self, error: GrafanaClientError) -> PushError:
        if error.status_code == 404:
            return _NotFound(f"{self._url} has no such thing (404); is the address right?")
        if error.status_code == 403:
            return PushError(f"{self._url} does not let this token write here (403); its account needs the role Editor")
        if error.status_code == 412:
            return PushError(
                f"{self._url} holds a board of the same name that is not ours, or is provisioned (412): remove it first"
            )
        return PushError(f"{self._url} refused: {error}")


class _NotFound(PushError):
    """Grafana answered 404."""


def _lines(board: Mapping[str, Any]) -> list[str]:
    return json.dumps(board, indent=1, sort_keys=True).splitlines()
