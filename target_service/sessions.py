"""Who may open a session, and what the open ones hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flashduet.errors import Conflict, InvalidRequest, Overloaded
from flashduet.sampling import MAX_TOP_LOGPROBS, Sampling
from flashduet.v1 import common_pb2, target_pb2
from target_service.session import Session

ID_BYTES = 16
_RETRY_AFTER_S = 1.0
_MAX_SALT = 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one target.

    Attributes:
        context_window: tokens of a sequence, prompt and answer together; no more than there are
            blocks for, so that every session fits alone.
        vocab_size: token ids are below it.
        max_sessions: open at a time.
        max_block_length: anchor and draft tokens of one round.
    """

    context_window: int
    vocab_size: int
    max_sessions: int
    max_block_length: int


class Sessions:
    """The open sessions. Used in the event loop alone.

    They reserve nothing: blocks of keys and values are taken as they fill, and the scheduler sees
    to it that every session gets on.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._open: dict[tuple[bytes, int], Session] = {}

    @property
    def count(self) -> int:
        return len(self._open)

    def open(self, message: target_pb2.DecodeOpen) -> Session:
        """Check the message and make its session, which `close` forgets.

        Raises:
            InvalidRequest: names the field, its value and its limit.
            Conflict: the session is open already.
            Overloaded: no room now.
        """
        check_id("open.session_id", message.session_id)
        if message.HasField("draft_instance_id"):
            check_id("open.draft_instance_id", message.draft_instance_id)
        token_limit = self._token_limit(message)
        self.check_tokens("open.token_ids", message.token_ids)
        sampling = Sampling.from_proto(message.sampling, "open.sampling")
        sampling.check_vocabulary(self.limits.vocab_size, "open.sampling")
        prompt_length = _prompt_length(message)
        _check_rest(message)
        key = (message.session_id, message.epoch)
        if key in self._open:
            raise Conflict(f"session {message.session_id.hex()}: epoch {message.epoch} is open")
        if self.count >= self.limits.max_sessions:
            limit = self.limits.max_sessions
            raise Overloaded(f"all {limit} sessions are in use", _RETRY_AFTER_S)
        session = Session(
            session_id=message.session_id,
            epoch=message.epoch,
            choice=message.choice,
            sampling=sampling,
            token_limit=token_limit,
            prompt_length=prompt_length,
            token_ids=list(message.token_ids),
            draft_context_hit=message.draft_context_hit,
            top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
            cache_key=message.cache_salt.encode(),
            batch=message.priority == common_pb2.PRIORITY_BATCH,
        )
        self._open[key] = session
        return session

    def close(self, session: Session) -> None:
        """Forget the session; its blocks are the scheduler's to free."""
        self._open.pop((session.session_id, session.epoch), None)

    def check_tokens(self, field: str, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest naming the first token id outside the vocabulary."""
        if token_ids and max(token_ids) >= self.limits.vocab_size:
            for index, token_id in enumerate(token_ids):
                if token_id >= self.limits.vocab_size:
                    limit = f"must be below the vocabulary's size {self.limits.vocab_size}"
                    raise InvalidRequest(f"{field}[{index}]", token_id, limit)

    def check_round(self, session: Session, message: target_pb2.DecodeVerify) -> None:
        """Whether a round fits its session.

        Raises:
            Conflict: the base is not the anchor's position.
            InvalidRequest: too many tokens or steps, or a token outside the vocabulary.
        """
        if message.base != session.anchor_position:
            raise Conflict(
                f"verify.base {message.base} given, the anchor is at {session.anchor_position}"
            )
        count, most = len(message.token_ids), self.limits.max_block_length - 1
        if count > most:
            raise InvalidRequest("verify.token_ids", f"{count} tokens", f"at most {most} a round")
        room = session.token_limit - message.base - 1
        if count > room:
            limit = f"the session has room for {room} after its anchor"
            raise InvalidRequest("verify.token_ids", f"{count} tokens", limit)
        if message.more_steps > room - count:
            limit = f"the session has room for {room - count} after this round"
            raise InvalidRequest("verify.more_steps", message.more_steps, limit)
        self.check_tokens("verify.token_ids", message.token_ids)

    def _token_limit(self, message: target_pb2.DecodeOpen) -> int:
        """Tokens that the session may grow to, the prompt included."""
        window, given = self.limits.context_window, len(message.token_ids)
        if given == 0:
            raise InvalidRequest("open.token_ids", "0 tokens", "at least 1")
        if given >= window:
            limit = f"at most {window - 1}, the context window of {window} less one answer token"
            raise InvalidRequest("open.token_ids", f"{given} tokens", limit)
        if not message.HasField("max_tokens"):
            return window
        if message.max_tokens == 0:
            raise InvalidRequest("open.max_tokens", 0, "at least 1")
        return min(window, given + message.max_tokens)


def check_id(field: str, value: bytes) -> None:
    """Raises InvalidRequest unless value is 16 bytes."""
    if len(value) != ID_BYTES:
        raise InvalidRequest(field, f"{len(value)} bytes", f"must be {ID_BYTES} bytes")


def _prompt_length(message: target_pb2.DecodeOpen) -> int:
    given = len(message.token_ids)
    if not message.HasField("prompt_length"):
        return given
    if not 1 <= message.prompt_length <= given:
        limit = f"must be from 1 to the {given} token_ids"
        raise InvalidRequest("open.prompt_length", message.prompt_length, limit)
    return message.prompt_length


def _check_rest(message: target_pb2.DecodeOpen) -> None:
    if message.HasField("top_logprobs") and message.top_logprobs > MAX_TOP_LOGPROBS:
        raise InvalidRequest(
            "open.top_logprobs", message.top_logprobs, f"at most {MAX_TOP_LOGPROBS}"
        )
    given = len(message.token_ids)
    if message.draft_context_hit > given:
        limit = f"at most the {given} token_ids"
        raise InvalidRequest("open.draft_context_hit", message.draft_context_hit, limit)
    if len(message.cache_salt) > _MAX_SALT:
        limit = f"at most {_MAX_SALT} characters"
        raise InvalidRequest("open.cache_salt", f"{len(message.cache_salt)} characters", limit)
