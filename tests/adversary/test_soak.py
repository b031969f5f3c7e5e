"""The soak in short: all attacks at once for a minute and a half; ``opsd bench soak`` is the long one."""

from __future__ import annotations

import pytest

from tests.adversary.attacker import Attacker
from tests.adversary.soak.play import play


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_is_lost_while_all_attacks_go_on(attacker: Attacker) -> None:
    """Each planted fault is in the journal and told once, all is counted, and every scrape is answered."""
    del attacker  # says whether another user can run a Python here
    seen = play(90.0, files=5_000, runs=100)
    assert seen["lost"] == "nothing"
    assert seen["planted_xids"] >= 2 and seen["planted_warnings"] > 50
    assert seen["scrapes_unanswered"] == 0 and seen["scrapes"] > 30
    assert seen["rss_max_mib"] < 256  # the limit of the unit
