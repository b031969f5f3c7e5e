"""Settings that all tests share."""

from __future__ import annotations

import signal
import threading

from hypothesis import settings

settings.register_profile("opsd", deadline=None)
settings.load_profile("opsd")

# A shell ignores these two for what it runs in the background, and programs under test would inherit that.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
