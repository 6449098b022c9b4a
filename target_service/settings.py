"""Settings of the target service, from FLASHDUET_TARGET_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from flashduet.settings import DtypeChoice, ServiceSettings, TransportChoice, default_socket_dir

NumericsChoice = Literal["fast", "batch_invariant"]
CompileChoice = Literal["auto", "wait", "off"]


class TargetSettings(ServiceSettings):
    """Each field is also an environment variable: FLASHDUET_TARGET_LISTEN and so on."""

    model_config = SettingsConfigDict(
        env_prefix="FLASHDUET_TARGET_", extra="ignore", frozen=True, protected_namespaces=()
    )

    listen: str = "127.0.0.1:50051"
    # `default`, a folder, a .gguf file, a Hub id, or hub/id:file.gguf.
    model: str = "default"
    # Name that clients use; empty means the reference's own.
    name: str = ""
    # Draft endpoints that features are sent to, comma-separated; empty means undrafted.
    drafts: str = ""
    # `auto` keeps the checkpoint's own element type.
    dtype: DtypeChoice = "auto"
    # `auto`, `cpu`, `cuda` or `cuda:N`.
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    transport: TransportChoice = "auto"
    # Where ring descriptors are passed; the draft service needs the same folder.
    socket_dir: Path = Field(default_factory=default_socket_dir)
    max_sessions: int = Field(default=256, ge=1, le=4096)
    # Tokens of KV that all sessions together may hold, found prefixes included; 0 means all
    # sessions at full length, or what a third of the free memory holds if that is less.
    max_kv_tokens: int = Field(default=0, ge=0)
    # Tokens of a block of KV: the step in which memory is taken and prefixes are found again. 0
    # means 256 where flash-attn reads them (on GPUs, in 16 bits, where it is installed), else 16.
    block_tokens: int = Field(default=0, ge=0, le=1024)
    # Anchor + draft tokens that one Verify may carry.
    max_block_length: int = Field(default=32, ge=1, le=256)
    # A longer prompt is computed in chunks of at most this size; of less while others decode.
    prefill_chunk_tokens: int = Field(default=256, ge=1, le=8192)
    # Rows of one step, over all sessions.
    max_step_tokens: int = Field(default=512, ge=256, le=65536)
    # Size of the tensor ring of each draft stream.
    ring_mib: int = Field(default=64, ge=1, le=16384)
    # Compute threads; 0 means all cores.
    threads: int = Field(default=0, ge=0, le=1024)
    # `fast`, or `batch_invariant`: output that depends neither on the batch nor on block lengths,
    # also in bfloat16.
    numerics: NumericsChoice = "fast"
    # Run passes compiled, on CPUs in 16 bits: `auto` compiles in the background where that has not
    # been done before, `wait` before serving, `off` never.
    compile: CompileChoice = "auto"
    # On GPUs with flash-attn, record decoding passes as CUDA graphs.
    cuda_graphs: bool = True
    # Caps the model's own context window, tokens.
    context_window: int | None = Field(default=None, ge=2)
