"""The package installs into an empty environment, and the programs of all pages run as printed.

A page is a Markdown file for readers: README.md, docs/ and the READMEs of the clients. A block
without a `client` of its own gets that of its page. A block after `<!-- excerpt: REASON -->` is
left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import Kubefan, Process

REPOSITORY = Path(__file__).parents[4]
#: Pages whose programs other tests run.
ELSEWHERE = {"docs/integrations/kopf.md": "tests/integration/integrations/kopf.rs"}
#: The address in the pages.
ADDRESS = "127.0.0.1:7443"
#: What a block without a client continues.
BEGINNING = f'from kubefan import Client\n\nclient = Client.connect("{ADDRESS}")\n'
_BLOCK = re.compile(
    r"^(<!-- excerpt: [^\n]+ -->\n)?```python\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_EVENT = r"(ADDED|MODIFIED|DELETED) \S+/\S+"
#: What each program prints. One that prints nothing here needs a server with a certificate, and is
#: only read by mypy.
PRINTED: dict[str, list[list[str]]] = {
    "clients/python/README.md": [
        [r"ADDED \S+/\S+ \w+\n"],
        [r"new: \S+/\S+\n", r"node-\d+ \d+"],
        [r"ADDED \S+/\S+\n"],
    ],
    "docs/clients-python.md": [
        [r"ADDED \S+/\S+\n", rf"{_EVENT}\n"],
        [r"ADDED team-0/web-0-\S+ \w+\n"],
        [r"ADDED \S+/\S+\n", rf"missed: {_EVENT}\n"],
        [r"ADDED \S+/\S+\n", r"the state is complete\n"],
        [
            r"\d+ pods at version \d+(\.end)?\n",
            r"team-0/web-0-\S+ \w+\n",
            rf"since then: {_EVENT}\n",
        ],
        # Handlers print meanwhile, and `print` writes each argument and the end of the line by
        # itself. So only the text of one string is surely in one piece.
        [r"new: \S+/\S+\n", r"\d+ pods on node-1", r"changed: \S+/\S+"],
        [r"\d+ pods\n"],
        [r"\S+/\S+ \{'status': \{'phase': '\w+'\}\}\n"],
        [r"start over: .+\n", r"ADDED \S+/\S+\n"],
        [],
        [r"OBJECT_NOT_FOUND\n"],
        [],
    ],
}


def blocks(page: Path) -> list[str]:
    """The programs of a page."""
    found = _BLOCK.findall(page.read_text())
    return [program for excerpt, program in found if not excerpt]


def pages() -> dict[str, list[str]]:
    """The programs of each page that has any."""
    files = [REPOSITORY / "README.md", *sorted(REPOSITORY.glob("docs/**/*.md"))]
    files += sorted(REPOSITORY.glob("clients/*/README.md"))
    named = {str(file.relative_to(REPOSITORY)): blocks(file) for file in files}
    return {name: programs for name, programs in named.items() if programs}


PAGES = {name: programs for name, programs in pages().items() if name not in ELSEWHERE}
PROGRAMS = [(name, number) for name, programs in PAGES.items() for number in range(len(programs))]


def program_of(name: str, number: int) -> str:
    """A block with the code that it continues."""
    block = PAGES[name][number]
    makes_one = re.search(r"^from kubefan(\.aio)? import Client\b", block, re.MULTILINE)
    return block if makes_one else BEGINNING + block


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which only `pip install ./clients/python` has run."""
    directory = tmp_path_factory.mktemp("project")
    venv.create(directory, with_pip=True)
    python = directory / "bin/python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--retries",
        "10",
        "./clients/python",
    ]
    subprocess.run(install, cwd=REPOSITORY, check=True)
    return python


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubefan]:
    """A kubefan with a simulated cluster."""
    small = ["--objects", "1000", "--subscribers", "1", "--rate", "20"]
    with Kubefan(["demo", "--duration", "0", *small], tmp_path_factory.mktemp("demo")) as server:
        yield server


def test_every_program_of_every_page_is_tested() -> None:
    assert {name: len(programs) for name, programs in PAGES.items()} == {
        name: len(printed) for name, printed in PRINTED.items()
    }
    for name, test in ELSEWHERE.items():
        assert blocks(REPOSITORY / name)
        assert (REPOSITORY / test).exists()
    for name, programs in PAGES.items():
        for number, program in enumerate(programs):
            assert PRINTED[name][number] or "https://" in program, (name, number)


def test_the_first_programs_are_short() -> None:
    for programs in PAGES.values():
        assert len(programs[0].splitlines()) < 20


@pytest.mark.parametrize(("name", "number"), PROGRAMS)
def test_a_program_runs_as_printed(
    name: str, number: int, installed: Path, demo: Kubefan, tmp_path: Path
) -> None:
    if not PRINTED[name][number]:
        pytest.skip("mypy reads it: it needs a server with a certificate")
    program = tmp_path / "program.py"
    program.write_text(program_of(name, number).replace(ADDRESS, demo.address))
    # The READMEs take the address as an argument.
    arguments = [str(installed), "-u", str(program), demo.address]
    process = Process(arguments, tmp_path / "log", stdin=subprocess.PIPE)
    for pattern in PRINTED[name][number]:
        process.until_written(pattern)
    process.end()


def test_the_package_has_its_license_and_one_version(installed: Path) -> None:
    program = (
        "from importlib.metadata import distribution\n"
        "import kubefan, kubefan._endpoint\n"
        "made = distribution('kubefan')\n"
        "print(made.version, kubefan.__version__, kubefan._endpoint.USER_AGENT.split('/')[1])\n"
        "print(made.metadata['License-Expression'], made.metadata.get_all('License-File'))\n"
        "print(made.read_text('licenses/LICENSE'), end='')\n"
    )
    printed = subprocess.run(
        [str(installed), "-c", program], capture_output=True, text=True, check=True
    ).stdout
    versions, license_names, text = printed.split("\n", 2)
    assert len(set(versions.split())) == 1, versions
    assert license_names == "Apache-2.0 ['LICENSE']"
    assert text == (REPOSITORY / "LICENSE").read_text(), "cp LICENSE clients/python/LICENSE"


def test_the_programs_have_the_right_types(installed: Path, tmp_path: Path) -> None:
    files = []
    for name, number in PROGRAMS:
        file = (
            tmp_path / f"{name.replace('/', '_').replace('.', '_').replace('-', '_')}_{number}.py"
        )
        file.write_text(program_of(name, number))
        files.append(str(file))
    check = ["--check-untyped-defs", f"--python-executable={installed}", *files]
    subprocess.run([sys.executable, "-m", "mypy", *check], cwd=tmp_path, check=True)


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
