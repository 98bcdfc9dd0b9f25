"""The package installs into an empty environment, and the programs of its README run as printed."""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Kubefan, Process

PACKAGE = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (PACKAGE / "README.md").read_text(), re.DOTALL)
#: What each program prints.
PRINTED = (
    [r"ADDED \S+/\S+ \w+\n"],
    [r"new: \S+/\S+\n", r"node-\d+ \d+\n"],
    [r"ADDED \S+/\S+\n"],
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which only `pip install ./clients/python` has run."""
    directory = tmp_path_factory.mktemp("project")
    venv.create(directory, with_pip=True)
    python = directory / "bin/python"
    install = [str(python), "-m", "pip", "install", "--quiet", "./clients/python"]
    subprocess.run(install, cwd=PACKAGE.parents[1], check=True)
    return python


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubefan]:
    """A kubefan with a simulated cluster."""
    small = ["--objects", "100", "--subscribers", "1", "--rate", "20"]
    with Kubefan(["demo", "--duration", "0", *small], tmp_path_factory.mktemp("demo")) as server:
        yield server


def test_the_first_program_is_short() -> None:
    assert len(PROGRAMS) == len(PRINTED)
    assert len(PROGRAMS[0].splitlines()) < 20


@pytest.mark.parametrize("number", range(len(PRINTED)))
def test_a_program_of_the_readme_runs_as_printed(
    number: int, installed: Path, demo: Kubefan, tmp_path: Path
) -> None:
    program = tmp_path / "pods.py"
    program.write_text(PROGRAMS[number])
    arguments = [str(installed), str(program), demo.address]
    process = Process(arguments, tmp_path / "log", stdin=subprocess.PIPE)
    for pattern in PRINTED[number]:
        process.until_written(pattern)
    process.end()


def test_the_types_of_the_package_are_found(installed: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from kubefan import Client\n"
        "with Client('h:1') as client:\n"
        "    for event in client.watch('pods', namespace='n'):\n"
        "        reveal_type(event.object.key)\n"
        "    client.watch('pods', no_such_option=1)\n"
    )
    check = ["-m", "mypy", "--strict", f"--python-executable={installed}", str(program)]
    checked = subprocess.run(
        [sys.executable, *check], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert 'Revealed type is "builtins.str"' in checked.stdout, checked.stdout + checked.stderr
    assert "no_such_option" in checked.stdout
    assert "Found 1 error" in checked.stdout
