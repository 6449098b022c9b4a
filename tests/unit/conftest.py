"""What several unit tests share and none should make anew."""

from __future__ import annotations

from pathlib import Path

import pytest

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
