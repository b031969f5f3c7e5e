"""Attaches opsd's callback to the trainers of Hugging Face and TRL in an unchanged program."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ADAPTER = "opsd.adapters.huggingface"


def attach(_: ModuleType) -> None:
    """``transformers.trainer`` has been imported: every trainer that is made from now on gets the callback."""
    try:
        _find_opsd(Path(__file__).parents[2])
        importlib.import_module(ADAPTER).attach_to_all()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        print(
            f"opsd: transformers' trainers report less than they could, and are not audited ({said})", file=sys.stderr
        )


def _find_opsd(package: Path) -> None:
    """Make opsd importable where the ranks' Python does not have it, without the packages beside it."""
    if "opsd" in sys.modules or importlib.util.find_spec("opsd") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "opsd", package / "__init__.py", submodule_search_locations=[str(package)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["opsd"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
