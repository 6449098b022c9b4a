"""Each service decides how gRPC waits before gRPC is there to read it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flashduet.grpc_polling import POLLING

# Ends at the first import of grpc, with what the environment says by then.
LOOK = """
import importlib, os, sys

class Looker:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            print(os.environ.get("GRPC_EXPERIMENTS"))
            sys.exit()

sys.meta_path.insert(0, Looker())
importlib.import_module(sys.argv[1])
"""


def polling_of(module: str, **given: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in POLLING}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, module],
        env={**environment, **given},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("service", ["target_service", "draft_service", "gateway"])
def test_services_choose_before_grpc_is_imported(service: str) -> None:
    assert polling_of(f"{service}.__main__") == POLLING["GRPC_EXPERIMENTS"]


def test_what_the_operator_chose_stays() -> None:
    assert polling_of("gateway.__main__", GRPC_EXPERIMENTS="another") == "another"
