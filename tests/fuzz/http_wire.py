"""A keep-alive HTTP/1.1 client that sends any bytes it is given, and reads answers strictly."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

ANSWER_S = 120.0
_MOST_HEADERS_BYTES = 64 * 1024


class WireError(Exception):
    """The answer was no HTTP, or none came."""


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """One answer; header names in lower case. Status 0: the server hung up without one."""

    status: int
    headers: dict[str, str]
    body: bytes


class Wire:
    """One connection at a time to one server, opened again when the server closes it."""

    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, request: bytes, *, head: bool = False) -> HttpAnswer:
        """A whole request's answer.

        Raises:
            WireError: see there.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                for attempt in range(2):
                    fresh = self._writer is None
                    reader, writer = await self._connection()
                    try:
                        writer.write(request)
                        return await self._answer(reader, head=head)
                    except (ConnectionError, asyncio.IncompleteReadError):
                        # A kept connection may have been closed while the request was on its way.
                        self.close()
                        if fresh or attempt:
                            return HttpAnswer(0, {}, b"")
        except TimeoutError:
            self.close()
            raise WireError(f"no answer within {ANSWER_S:g} s") from None
        raise AssertionError("unreachable")

    async def send_broken(self, request: bytes) -> HttpAnswer:
        """The answer to bytes that may be no request, which are all that the server will get."""
        self.close()
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await self._connection()
                try:
                    writer.write(request)
                    await writer.drain()
                    writer.write_eof()
                    return await self._answer(reader, head=False)
                except (OSError, asyncio.IncompleteReadError):
                    return HttpAnswer(0, {}, b"")
        except TimeoutError:
            raise WireError(f"the connection stayed open for {ANSWER_S:g} s") from None
        finally:
            self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def _connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._reader is None or self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                *self._address, limit=_MOST_HEADERS_BYTES
            )
        return self._reader, self._writer

    async def _answer(self, reader: asyncio.StreamReader, *, head: bool) -> HttpAnswer:
        try:
            while True:
                lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                version, status, *_ = lines[0].split(" ")
                if status != "100":
                    break
            headers = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines[1:] if line)
            }
            if not version.startswith("HTTP/1.") or not status.isdecimal():
                raise WireError(f"no status line: {lines[0][:80]!r}")
            body = b"" if head or status in ("204", "304") else await self._body(reader, headers)
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise WireError(f"no HTTP: {error}") from error
        if headers.get("connection", "").lower() == "close":
            self.close()
        return HttpAnswer(int(status), headers, body)

    async def _body(self, reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await reader.readexactly(int(headers["content-length"]))
        if headers.get("transfer-encoding") != "chunked":
            body = await reader.read()
            self.close()
            return body
        parts = []
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readuntil(b"\r\n")
        return b"".join(parts)
