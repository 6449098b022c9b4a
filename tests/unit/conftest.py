"""What several unit tests share and none should make anew."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from flashduet.sampling import choose
from flashduet.sampling.machine import native_choice
from target_service.compiled.library import build_library, load_library
from target_service.compiled.package import compiler


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of native attention, loaded into this process."""
    if compiler() is None:
        pytest.skip("no C++ compiler here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLASHDUET_CACHE", str(tmp_path_factory.mktemp("native")))
        path = build_library()
        assert load_library()
    return path


@pytest.fixture
def errors(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """What has been logged as an error during the test.

    What earlier tests left behind is collected before: a task whose error nobody asked for is
    logged when it goes, in whichever test runs then.
    """
    gc.collect()
    caplog.clear()
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]


@pytest.fixture(params=["machine code", "arrays"])
def way_to_choose(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tokens are chosen by one of the two ways that there are."""
    if request.param == "arrays":
        monkeypatch.setattr(choose, "native_choice", lambda: None)
    elif compiler() is None:
        pytest.skip("no C++ compiler here")
    else:
        assert native_choice() is not None
    return request.param
