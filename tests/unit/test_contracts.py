"""The wire contracts: fresh stubs, clean lint, presence where a zero is not the default."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashduet.v1 import common_pb2, draft_pb2, gateway_pb2, target_pb2

ROOT = Path(__file__).resolve().parents[2]


def test_stubs_are_what_the_protos_give():
    check = subprocess.run(
        [sys.executable, "scripts/generate_stubs.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_protos_pass_buf_lint():
    buf = shutil.which("buf") or str(Path(sys.executable).with_name("buf"))
    lint = subprocess.run(
        [buf, "lint"], cwd=ROOT / "proto", capture_output=True, text=True, timeout=60
    )
    assert lint.returncode == 0, lint.stdout + lint.stderr


@pytest.mark.parametrize("field", ["temperature", "top_p", "top_k", "min_p", "seed"])
def test_an_explicit_zero_is_not_an_absent_field(field):
    params = common_pb2.SamplingParams()
    assert not params.HasField(field)
    setattr(params, field, 0)
    assert common_pb2.SamplingParams.FromString(params.SerializeToString()).HasField(field)


@pytest.mark.parametrize(
    "message",
    [target_pb2.DecodeRequest, draft_pb2.ProposeRequest, draft_pb2.IngestRequest],
)
def test_every_streamed_request_carries_a_traceparent(message):
    assert "traceparent" in message.DESCRIPTOR.fields_by_name


def test_tensor_payload_is_a_oneof_of_ring_and_inline():
    storage = common_pb2.TensorPayload.DESCRIPTOR.oneofs_by_name["storage"]
    assert [field.name for field in storage.fields] == ["ring", "inline"]


def test_a_prompt_is_text_chat_or_token_ids():
    prompt = gateway_pb2.GenerateRequest.DESCRIPTOR.oneofs_by_name["prompt"]
    assert [field.name for field in prompt.fields] == ["text", "chat", "token_ids"]
