from flashduet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("traceparent", "open", "verify", "close")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    open: DecodeOpen
    verify: DecodeVerify
    close: DecodeClose
    def __init__(self, traceparent: _Optional[str] = ..., open: _Optional[_Union[DecodeOpen, _Mapping]] = ..., verify: _Optional[_Union[DecodeVerify, _Mapping]] = ..., close: _Optional[_Union[DecodeClose, _Mapping]] = ...) -> None: ...

class DecodeOpen(_message.Message):
    __slots__ = ("session_id", "epoch", "choice", "token_ids", "prompt_length", "sampling", "draft_instance_id", "deadline_ms", "max_tokens", "top_logprobs", "priority", "cache_salt", "draft_context_hit", "stop_token_ids")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CONTEXT_HIT_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _common_pb2.SamplingParams
    draft_instance_id: bytes
    deadline_ms: int
    max_tokens: int
    top_logprobs: int
    priority: _common_pb2.Priority
    cache_salt: str
    draft_context_hit: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., draft_instance_id: _Optional[bytes] = ..., deadline_ms: _Optional[int] = ..., max_tokens: _Optional[int] = ..., top_logprobs: _Optional[int] = ..., priority: _Optional[_Union[_common_pb2.Priority, str]] = ..., cache_salt: _Optional[str] = ..., draft_context_hit: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeVerify(_message.Message):
    __slots__ = ("round", "base", "token_ids", "more_steps", "one_by_one")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MORE_STEPS_FIELD_NUMBER: _ClassVar[int]
    ONE_BY_ONE_FIELD_NUMBER: _ClassVar[int]
    round: int
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    more_steps: int
    one_by_one: bool
    def __init__(self, round: _Optional[int] = ..., base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., more_steps: _Optional[int] = ..., one_by_one: _Optional[bool] = ...) -> None: ...

class DecodeClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("opened", "verified", "closed")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    opened: DecodeOpened
    verified: DecodeVerified
    closed: DecodeClosed
    def __init__(self, opened: _Optional[_Union[DecodeOpened, _Mapping]] = ..., verified: _Optional[_Union[DecodeVerified, _Mapping]] = ..., closed: _Optional[_Union[DecodeClosed, _Mapping]] = ...) -> None: ...

class DecodeOpened(_message.Message):
    __slots__ = ("first_token_id", "cached_tokens", "drafting", "timings", "prefill_chunks", "first_logprobs")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    cached_tokens: int
    drafting: bool
    timings: _common_pb2.PhaseTimings
    prefill_chunks: int
    first_logprobs: _common_pb2.PositionLogprobs
    def __init__(self, first_token_id: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., drafting: _Optional[bool] = ..., timings: _Optional[_Union[_common_pb2.PhaseTimings, _Mapping]] = ..., prefill_chunks: _Optional[int] = ..., first_logprobs: _Optional[_Union[_common_pb2.PositionLogprobs, _Mapping]] = ...) -> None: ...

class DecodeVerified(_message.Message):
    __slots__ = ("round", "accepted", "bonus_token_id", "drafting", "timings", "logprobs", "more_token_ids")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BONUS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    round: int
    accepted: int
    bonus_token_id: int
    drafting: bool
    timings: _common_pb2.PhaseTimings
    logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.PositionLogprobs]
    more_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, round: _Optional[int] = ..., accepted: _Optional[int] = ..., bonus_token_id: _Optional[int] = ..., drafting: _Optional[bool] = ..., timings: _Optional[_Union[_common_pb2.PhaseTimings, _Mapping]] = ..., logprobs: _Optional[_Iterable[_Union[_common_pb2.PositionLogprobs, _Mapping]]] = ..., more_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DecodeClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("instance_id", "protocol_version", "facts", "max_sessions", "max_block_length", "device", "drafts", "numerics", "max_top_logprobs")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    protocol_version: int
    facts: _common_pb2.ModelFacts
    max_sessions: int
    max_block_length: int
    device: str
    drafts: _containers.RepeatedCompositeFieldContainer[AttachedDraft]
    numerics: str
    max_top_logprobs: int
    def __init__(self, instance_id: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., facts: _Optional[_Union[_common_pb2.ModelFacts, _Mapping]] = ..., max_sessions: _Optional[int] = ..., max_block_length: _Optional[int] = ..., device: _Optional[str] = ..., drafts: _Optional[_Iterable[_Union[AttachedDraft, _Mapping]]] = ..., numerics: _Optional[str] = ..., max_top_logprobs: _Optional[int] = ...) -> None: ...

class AttachedDraft(_message.Message):
    __slots__ = ("instance_id", "transport", "target_layer_ids")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    transport: _common_pb2.Transport
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, instance_id: _Optional[bytes] = ..., transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., target_layer_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TargetServiceGetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TargetServiceGetLoadResponse(_message.Message):
    __slots__ = ("sessions", "max_sessions", "kv_tokens", "max_kv_tokens", "queued_items", "ring_records", "steps", "dropped_chunks", "kv_blocks", "free_kv_blocks", "cached_kv_blocks", "kv_block_tokens", "preemptions", "prompt_tokens", "cached_prompt_tokens", "step_times")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    RING_RECORDS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    max_sessions: int
    kv_tokens: int
    max_kv_tokens: int
    queued_items: int
    ring_records: int
    steps: int
    dropped_chunks: _containers.RepeatedCompositeFieldContainer[_common_pb2.ReasonCount]
    kv_blocks: int
    free_kv_blocks: int
    cached_kv_blocks: int
    kv_block_tokens: int
    preemptions: int
    prompt_tokens: int
    cached_prompt_tokens: int
    step_times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTime]
    def __init__(self, sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., kv_tokens: _Optional[int] = ..., max_kv_tokens: _Optional[int] = ..., queued_items: _Optional[int] = ..., ring_records: _Optional[int] = ..., steps: _Optional[int] = ..., dropped_chunks: _Optional[_Iterable[_Union[_common_pb2.ReasonCount, _Mapping]]] = ..., kv_blocks: _Optional[int] = ..., free_kv_blocks: _Optional[int] = ..., cached_kv_blocks: _Optional[int] = ..., kv_block_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_prompt_tokens: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[_common_pb2.StepTime, _Mapping]]] = ...) -> None: ...
