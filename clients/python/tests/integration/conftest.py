"""Fixtures for the tests with a real kube-apiserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .processes import ApiServer, Kubefan


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A control plane that tests share. Each works in a namespace of its own."""
    server = ApiServer(tmp_path_factory.mktemp("control-plane"))
    yield server
    server.close()


@pytest.fixture
def private_api(tmp_path: Path) -> Iterator[ApiServer]:
    """A control plane that the test may restart and compact."""
    server = ApiServer(tmp_path)
    yield server
    server.close()


@pytest.fixture(scope="session")
def kubefan(api: ApiServer) -> Iterator[Kubefan]:
    """A kubefan that tests share."""
    with Kubefan.serve(api) as server:
        yield server
