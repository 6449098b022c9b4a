from flashduet.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RefusalReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REFUSAL_REASON_UNSPECIFIED: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNKNOWN_SESSION: _ClassVar[RefusalReason]
    REFUSAL_REASON_WRONG_EPOCH: _ClassVar[RefusalReason]
    REFUSAL_REASON_BEHIND_CONTEXT: _ClassVar[RefusalReason]
    REFUSAL_REASON_CONTEXT_LATE: _ClassVar[RefusalReason]
    REFUSAL_REASON_TOO_MANY_SESSIONS: _ClassVar[RefusalReason]
    REFUSAL_REASON_BAD_REQUEST: _ClassVar[RefusalReason]
    REFUSAL_REASON_UNKNOWN_TARGET: _ClassVar[RefusalReason]
    REFUSAL_REASON_INTERNAL: _ClassVar[RefusalReason]

class NackReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NACK_REASON_UNSPECIFIED: _ClassVar[NackReason]
    NACK_REASON_UNKNOWN_SESSION: _ClassVar[NackReason]
    NACK_REASON_CLOSED_SESSION: _ClassVar[NackReason]
    NACK_REASON_WRONG_EPOCH: _ClassVar[NackReason]
    NACK_REASON_GAP: _ClassVar[NackReason]
    NACK_REASON_OUT_OF_RANGE: _ClassVar[NackReason]
    NACK_REASON_STALE_GENERATION: _ClassVar[NackReason]
    NACK_REASON_WRONG_SIZE: _ClassVar[NackReason]
    NACK_REASON_BAD_DATA_TYPE: _ClassVar[NackReason]
    NACK_REASON_WRONG_SHAPE: _ClassVar[NackReason]
    NACK_REASON_WRONG_TRANSPORT: _ClassVar[NackReason]
    NACK_REASON_NO_ROOM: _ClassVar[NackReason]
    NACK_REASON_WRONG_TARGET: _ClassVar[NackReason]
REFUSAL_REASON_UNSPECIFIED: RefusalReason
REFUSAL_REASON_UNKNOWN_SESSION: RefusalReason
REFUSAL_REASON_WRONG_EPOCH: RefusalReason
REFUSAL_REASON_BEHIND_CONTEXT: RefusalReason
REFUSAL_REASON_CONTEXT_LATE: RefusalReason
REFUSAL_REASON_TOO_MANY_SESSIONS: RefusalReason
REFUSAL_REASON_BAD_REQUEST: RefusalReason
REFUSAL_REASON_UNKNOWN_TARGET: RefusalReason
REFUSAL_REASON_INTERNAL: RefusalReason
NACK_REASON_UNSPECIFIED: NackReason
NACK_REASON_UNKNOWN_SESSION: NackReason
NACK_REASON_CLOSED_SESSION: NackReason
NACK_REASON_WRONG_EPOCH: NackReason
NACK_REASON_GAP: NackReason
NACK_REASON_OUT_OF_RANGE: NackReason
NACK_REASON_STALE_GENERATION: NackReason
NACK_REASON_WRONG_SIZE: NackReason
NACK_REASON_BAD_DATA_TYPE: NackReason
NACK_REASON_WRONG_SHAPE: NackReason
NACK_REASON_WRONG_TRANSPORT: NackReason
NACK_REASON_NO_ROOM: NackReason
NACK_REASON_WRONG_TARGET: NackReason

class ProposeRequest(_message.Message):
    __slots__ = ("traceparent", "session_id", "epoch", "open", "block", "rewind", "cancel", "heartbeat", "close")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    REWIND_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    session_id: bytes
    epoch: int
    open: ProposeOpen
    block: ProposeBlock
    rewind: ProposeRewind
    cancel: ProposeCancel
    heartbeat: ProposeHeartbeat
    close: ProposeClose
    def __init__(self, traceparent: _Optional[str] = ..., session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., open: _Optional[_Union[ProposeOpen, _Mapping]] = ..., block: _Optional[_Union[ProposeBlock, _Mapping]] = ..., rewind: _Optional[_Union[ProposeRewind, _Mapping]] = ..., cancel: _Optional[_Union[ProposeCancel, _Mapping]] = ..., heartbeat: _Optional[_Union[ProposeHeartbeat, _Mapping]] = ..., close: _Optional[_Union[ProposeClose, _Mapping]] = ...) -> None: ...

class ProposeOpen(_message.Message):
    __slots__ = ("choice", "target_instance_id", "sampling", "prompt_length", "token_ids", "cache_salt", "drafter_only")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_ONLY_FIELD_NUMBER: _ClassVar[int]
    choice: int
    target_instance_id: bytes
    sampling: _common_pb2.SamplingParams
    prompt_length: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    drafter_only: bool
    def __init__(self, choice: _Optional[int] = ..., target_instance_id: _Optional[bytes] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., prompt_length: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., drafter_only: _Optional[bool] = ...) -> None: ...

class ProposeBlock(_message.Message):
    __slots__ = ("round", "committed_length", "anchor_token_id", "block_length", "budget_us")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    BUDGET_US_FIELD_NUMBER: _ClassVar[int]
    round: int
    committed_length: int
    anchor_token_id: int
    block_length: int
    budget_us: int
    def __init__(self, round: _Optional[int] = ..., committed_length: _Optional[int] = ..., anchor_token_id: _Optional[int] = ..., block_length: _Optional[int] = ..., budget_us: _Optional[int] = ...) -> None: ...

class ProposeRewind(_message.Message):
    __slots__ = ("length", "new_epoch")
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    NEW_EPOCH_FIELD_NUMBER: _ClassVar[int]
    length: int
    new_epoch: int
    def __init__(self, length: _Optional[int] = ..., new_epoch: _Optional[int] = ...) -> None: ...

class ProposeCancel(_message.Message):
    __slots__ = ("round",)
    ROUND_FIELD_NUMBER: _ClassVar[int]
    round: int
    def __init__(self, round: _Optional[int] = ...) -> None: ...

class ProposeHeartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeClose(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("session_id", "epoch", "opened", "proposal", "refused", "closed", "rewound")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REWOUND_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    opened: ProposeOpened
    proposal: Proposal
    refused: ProposeRefused
    closed: ProposeClosed
    rewound: ProposeRewound
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., opened: _Optional[_Union[ProposeOpened, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., refused: _Optional[_Union[ProposeRefused, _Mapping]] = ..., closed: _Optional[_Union[ProposeClosed, _Mapping]] = ..., rewound: _Optional[_Union[ProposeRewound, _Mapping]] = ...) -> None: ...

class ProposeOpened(_message.Message):
    __slots__ = ("context_hit", "lease_ms")
    CONTEXT_HIT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    context_hit: int
    lease_ms: int
    def __init__(self, context_hit: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("round", "token_ids", "confidence", "timings", "copied_tokens")
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    COPIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    round: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    confidence: _containers.RepeatedScalarFieldContainer[float]
    timings: _common_pb2.PhaseTimings
    copied_tokens: int
    def __init__(self, round: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., confidence: _Optional[_Iterable[float]] = ..., timings: _Optional[_Union[_common_pb2.PhaseTimings, _Mapping]] = ..., copied_tokens: _Optional[int] = ...) -> None: ...

class ProposeRefused(_message.Message):
    __slots__ = ("reason", "round", "context_end", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_END_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: RefusalReason
    round: int
    context_end: int
    detail: str
    def __init__(self, reason: _Optional[_Union[RefusalReason, str]] = ..., round: _Optional[int] = ..., context_end: _Optional[int] = ..., detail: _Optional[str] = ...) -> None: ...

class ProposeClosed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProposeRewound(_message.Message):
    __slots__ = ("context_end",)
    CONTEXT_END_FIELD_NUMBER: _ClassVar[int]
    context_end: int
    def __init__(self, context_end: _Optional[int] = ...) -> None: ...

class IngestRequest(_message.Message):
    __slots__ = ("traceparent", "hello", "attach", "chunk")
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    traceparent: str
    hello: IngestHello
    attach: IngestAttach
    chunk: IngestChunk
    def __init__(self, traceparent: _Optional[str] = ..., hello: _Optional[_Union[IngestHello, _Mapping]] = ..., attach: _Optional[_Union[IngestAttach, _Mapping]] = ..., chunk: _Optional[_Union[IngestChunk, _Mapping]] = ...) -> None: ...

class IngestHello(_message.Message):
    __slots__ = ("protocol_version", "capabilities", "target_instance_id", "facts", "offers")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    FACTS_FIELD_NUMBER: _ClassVar[int]
    OFFERS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    target_instance_id: bytes
    facts: _common_pb2.ModelFacts
    offers: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    def __init__(self, protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., target_instance_id: _Optional[bytes] = ..., facts: _Optional[_Union[_common_pb2.ModelFacts, _Mapping]] = ..., offers: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ...) -> None: ...

class IngestAttach(_message.Message):
    __slots__ = ("transport", "ring_bytes", "ring_token")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    RING_BYTES_FIELD_NUMBER: _ClassVar[int]
    RING_TOKEN_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.Transport
    ring_bytes: int
    ring_token: bytes
    def __init__(self, transport: _Optional[_Union[_common_pb2.Transport, str]] = ..., ring_bytes: _Optional[int] = ..., ring_token: _Optional[bytes] = ...) -> None: ...

class IngestChunk(_message.Message):
    __slots__ = ("session_id", "epoch", "base", "token_ids", "features", "sequence")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    epoch: int
    base: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    features: _common_pb2.TensorPayload
    sequence: int
    def __init__(self, session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., base: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., features: _Optional[_Union[_common_pb2.TensorPayload, _Mapping]] = ..., sequence: _Optional[int] = ...) -> None: ...

class IngestResponse(_message.Message):
    __slots__ = ("welcome", "attached", "ack", "nack", "released")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    NACK_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    welcome: IngestWelcome
    attached: IngestAttached
    ack: IngestAck
    nack: IngestNack
    released: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, welcome: _Optional[_Union[IngestWelcome, _Mapping]] = ..., attached: _Optional[_Union[IngestAttached, _Mapping]] = ..., ack: _Optional[_Union[IngestAck, _Mapping]] = ..., nack: _Optional[_Union[IngestNack, _Mapping]] = ..., released: _Optional[_Iterable[int]] = ...) -> None: ...

class IngestWelcome(_message.Message):
    __slots__ = ("protocol_version", "capabilities", "draft_instance_id", "accepted", "target_layer_ids", "block_length")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    draft_instance_id: bytes
    accepted: _containers.RepeatedScalarFieldContainer[_common_pb2.Transport]
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    block_length: int
    def __init__(self, protocol_version: _Optional[int] = ..., capabilities: _Optional[_Iterable[str]] = ..., draft_instance_id: _Optional[bytes] = ..., accepted: _Optional[_Iterable[_Union[_common_pb2.Transport, str]]] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., block_length: _Optional[int] = ...) -> None: ...

class IngestAttached(_message.Message):
    __slots__ = ("transport",)
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.Transport
    def __init__(self, transport: _Optional[_Union[_common_pb2.Transport, str]] = ...) -> None: ...

class IngestAck(_message.Message):
    __slots__ = ("sequence", "session_id", "epoch", "context_end", "lent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_END_FIELD_NUMBER: _ClassVar[int]
    LENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    session_id: bytes
    epoch: int
    context_end: int
    lent: bool
    def __init__(self, sequence: _Optional[int] = ..., session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., context_end: _Optional[int] = ..., lent: _Optional[bool] = ...) -> None: ...

class IngestNack(_message.Message):
    __slots__ = ("sequence", "session_id", "epoch", "reason", "have")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    session_id: bytes
    epoch: int
    reason: NackReason
    have: int
    def __init__(self, sequence: _Optional[int] = ..., session_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., reason: _Optional[_Union[NackReason, str]] = ..., have: _Optional[int] = ...) -> None: ...

class DraftServiceGetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetModelInfoResponse(_message.Message):
    __slots__ = ("instance_id", "protocol_version", "name", "target_facts", "block_length", "target_layer_ids", "mask_token_id", "max_sessions", "device", "lease_ms", "target_instance_ids", "max_block_length", "self_test")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TARGET_FACTS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    TARGET_INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SELF_TEST_FIELD_NUMBER: _ClassVar[int]
    instance_id: bytes
    protocol_version: int
    name: str
    target_facts: _common_pb2.ModelFacts
    block_length: int
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    mask_token_id: int
    max_sessions: int
    device: str
    lease_ms: int
    target_instance_ids: _containers.RepeatedScalarFieldContainer[bytes]
    max_block_length: int
    self_test: SelfTest
    def __init__(self, instance_id: _Optional[bytes] = ..., protocol_version: _Optional[int] = ..., name: _Optional[str] = ..., target_facts: _Optional[_Union[_common_pb2.ModelFacts, _Mapping]] = ..., block_length: _Optional[int] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., mask_token_id: _Optional[int] = ..., max_sessions: _Optional[int] = ..., device: _Optional[str] = ..., lease_ms: _Optional[int] = ..., target_instance_ids: _Optional[_Iterable[bytes]] = ..., max_block_length: _Optional[int] = ..., self_test: _Optional[_Union[SelfTest, _Mapping]] = ...) -> None: ...

class SelfTest(_message.Message):
    __slots__ = ("prompt_token_ids", "tokens", "block_length", "acceptance_length")
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_LENGTH_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    tokens: int
    block_length: int
    acceptance_length: float
    def __init__(self, prompt_token_ids: _Optional[_Iterable[int]] = ..., tokens: _Optional[int] = ..., block_length: _Optional[int] = ..., acceptance_length: _Optional[float] = ...) -> None: ...

class DraftServiceGetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DraftServiceGetLoadResponse(_message.Message):
    __slots__ = ("sessions", "max_sessions", "context_rows", "max_context_rows", "queued_proposals", "rings", "proposals", "refused_chunks", "refused_proposals", "context_blocks", "free_context_blocks", "cached_context_blocks", "context_block_rows", "step_times")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_ROWS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    RINGS_FIELD_NUMBER: _ClassVar[int]
    PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PROPOSALS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_CONTEXT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_CONTEXT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_BLOCK_ROWS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    max_sessions: int
    context_rows: int
    max_context_rows: int
    queued_proposals: int
    rings: int
    proposals: int
    refused_chunks: _containers.RepeatedCompositeFieldContainer[_common_pb2.ReasonCount]
    refused_proposals: _containers.RepeatedCompositeFieldContainer[_common_pb2.ReasonCount]
    context_blocks: int
    free_context_blocks: int
    cached_context_blocks: int
    context_block_rows: int
    step_times: _containers.RepeatedCompositeFieldContainer[_common_pb2.StepTime]
    def __init__(self, sessions: _Optional[int] = ..., max_sessions: _Optional[int] = ..., context_rows: _Optional[int] = ..., max_context_rows: _Optional[int] = ..., queued_proposals: _Optional[int] = ..., rings: _Optional[int] = ..., proposals: _Optional[int] = ..., refused_chunks: _Optional[_Iterable[_Union[_common_pb2.ReasonCount, _Mapping]]] = ..., refused_proposals: _Optional[_Iterable[_Union[_common_pb2.ReasonCount, _Mapping]]] = ..., context_blocks: _Optional[int] = ..., free_context_blocks: _Optional[int] = ..., cached_context_blocks: _Optional[int] = ..., context_block_rows: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[_common_pb2.StepTime, _Mapping]]] = ...) -> None: ...
