"""``opsd launch`` in environments that others have made: those of ``module load``, and of ``conda activate``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import opsd
from opsd import exitcodes
from tests.fakes.launched import TRAIN, Launched

MODULES = Path("/usr/share/modules/init/bash")
FOREIGN = ("click", "httpx", "numpy", "psutil", "pydantic", "pynvml", "rich", "torch", "typing_extensions")
"""Packages of opsd that a module of another Python has as well, in versions that this one cannot import."""
needs_modules = pytest.mark.skipif(not MODULES.exists(), reason="not installed: environment-modules")


@pytest.fixture
def loaded(tmp_path: Path) -> tuple[str, ...]:
    """What a command is run within: a shell that has loaded a module of another Python and its packages."""
    packages = tmp_path / "apps/python/packages"
    packages.mkdir(parents=True)
    for name in FOREIGN:
        (packages / f"{name}.py").write_text(f"raise ImportError('{name} is that of another Python')\n")
    (packages / "site_code.py").write_text("NAME = 'of the site'\n")
    other = tmp_path / "apps/python/bin/python"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\nexit 3\n")
    other.chmod(0o755)
    file = tmp_path / "modulefiles/python/3.6"
    file.parent.mkdir(parents=True)
    file.write_text(
        f"#%Module1.0\nprepend-path PATH {other.parent}\nprepend-path PYTHONPATH {packages}\n"
        f"prepend-path LD_LIBRARY_PATH {packages}\nsetenv PYTHONUNBUFFERED 1\n"
    )
    script = f'. {MODULES} && module use {tmp_path}/modulefiles && module load python/3.6 && exec "$@"'
    return ("bash", "-c", script, "bash")


@needs_modules
def test_a_loaded_module_of_another_python(tmp_path: Path, loaded: tuple[str, ...]) -> None:
    """Its packages come last for opsd, which needs its own, and first for the ranks, as the user has asked for."""
    rank = """
        import site_code, sys
        assert site_code.NAME == "of the site"
        try:
            import click
        except ImportError as error:
            assert "another Python" in str(error)
            print("as loaded")
    """
    with Launched(tmp_path, rank, "--nproc-per-node=2", within=loaded) as launched:
        assert launched.wait() == exitcodes.OK, launched.err
        assert launched.out.count("as loaded") == 2


@needs_modules
@pytest.mark.parametrize(
    "command",
    [
        (str(Path(sys.executable).with_name("opsd")), "--version"),
        (sys.executable, "-m", "opsd", "runbook", "list"),
        (sys.executable, "-X", "dev", "-W", "ignore", "-um", "opsd", "runbook", "list"),
        (sys.executable, "-c", "from opsd.commands.main import main; main()", "runbook", "list"),
        (sys.executable, "-P", "-m", "opsd.launch.run.launchers"),
        (sys.executable, "-u", "-m", "opsd.trainer", "--help"),
    ],
)
def test_each_process_of_opsd_has_its_own_packages(loaded: tuple[str, ...], command: tuple[str, ...]) -> None:
    """The command, however it is called, what it starts, and the trainer."""
    done = subprocess.run([*loaded, *command], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@needs_modules
def test_a_program_that_is_called_opsd_has_the_packages_that_the_user_loaded(
    tmp_path: Path, loaded: tuple[str, ...]
) -> None:
    """Its name makes it none of opsd's own processes."""
    program = tmp_path / "opsd"
    program.write_text("import opsd.client\nimport click\n")
    command = [*loaded, sys.executable, "-P", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "click is that of another Python" in done.stderr


def test_an_empty_name_in_pythonpath(tmp_path: Path) -> None:
    """``PYTHONPATH=/apps:$PYTHONPATH`` names the working directory, whose modules come last as well."""
    for name in FOREIGN:
        (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the user')\n")
    command = [Path(sys.executable).with_name("opsd"), "runbook", "list"]
    environ = {**os.environ, "PYTHONPATH": "/apps:"}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def conda(tmp_path: Path) -> dict[str, str]:
    """The variables of an activated environment in conda's layout: a whole Python of its own, not a venv."""
    home = tmp_path / "conda/envs/train"
    inner = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
    (home / inner / "site-packages").mkdir(parents=True)
    for entry in (Path(sys.base_prefix) / inner).iterdir():
        if entry.name != "site-packages":
            (home / inner / entry.name).symlink_to(entry)
    python = home / "bin/python"
    python.parent.mkdir()
    shutil.copy(Path(sys.executable).resolve(), python)
    ask = "import site, sys; print(sys.prefix); print(site.getsitepackages()[0])"
    said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    prefix, packages = said.stdout.split()
    if prefix != str(home):
        pytest.skip(f"{sys.base_prefix} cannot be copied")
    Path(packages).mkdir(parents=True, exist_ok=True)
    (Path(packages) / "conda_code.py").touch()
    (Path(packages) / "checkout.pth").write_text(str(Path(opsd.__file__).parents[1]))
    return {
        "PATH": f"{python.parent}:{os.environ['PATH']}", "CONDA_PREFIX": str(home), "CONDA_DEFAULT_ENV": "train",
        "CONDA_SHLVL": "2", "CONDA_PREFIX_1": str(tmp_path / "conda"), "VIRTUAL_ENV": "",
    }  # fmt: skip


def test_ranks_run_with_the_python_of_conda(tmp_path: Path, conda: dict[str, str]) -> None:
    """Where opsd is installed elsewhere and PYTHON_EXEC names it; their progress is reported."""
    rank = TRAIN + "import conda_code\nassert sys.prefix == os.environ['CONDA_PREFIX']\ntrain(5)\n"
    with Launched(tmp_path, rank, "--nproc-per-node=2", env=conda | {"PYTHON_EXEC": "python"}) as launched:
        assert launched.wait() == exitcodes.OK, launched.err
        assert "the last is step 4" in launched.err


def test_the_other_python_is_named_when_a_module_is_missing(tmp_path: Path, conda: dict[str, str]) -> None:
    """What is installed in the environment that is active is not there for ranks that run with opsd's Python."""
    with Launched(tmp_path, "import conda_code", env=conda | {"VIRTUAL_ENV": "/left/by/the/shell"}) as launched:
        assert launched.wait() != exitcodes.OK
        assert f"PYTHON_EXEC=python takes that of {conda['CONDA_PREFIX']}" in launched.event("finished")["reason"]


def test_the_other_python_is_named_when_the_program_is_a_module_of_it(tmp_path: Path, conda: dict[str, str]) -> None:
    """``-m`` of what is installed there."""
    with Launched(tmp_path, "", "-m", program=("conda_code",), env=conda) as launched:
        assert launched.wait() == exitcodes.NOT_FOUND
        assert f"PYTHON_EXEC=python takes that of {conda['CONDA_PREFIX']}" in launched.err
