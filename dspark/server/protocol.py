"""uvicorn's reading of HTTP, where what clients send is bounded in size and time, and one that leaves is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import warnings
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dspark.errors import DSparkWarning
from dspark.server.errors import ApiError

MAX_HEAD = 1 << 16
"""Most bytes of a request's line and headers; trailers, and what frames chunks, come out of the same."""
_FRAMING = 8
"""Bytes that a chunked body may spend on framing for each of its own, as chunks of one byte do."""
_NEEDS = ("_should_upgrade", "_unset_keepalive_if_required", "handle_websocket_upgrade", "on_response_complete")
"""What is overridden or called here beside the parser's callbacks, and is no interface that uvicorn promises."""
_REASONS = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}


class GuardedProtocol(HttpToolsProtocol):
    """One connection. Beyond uvicorn's own:

    - heads are limited (431), and a connection that sends no whole one in time is closed;
    - so is one that leaves unread what it was sent, which frees its slot;
    - a client that leaves is noticed with requests pipelined behind the one that runs, too;
    - an offer to upgrade that nobody takes up (h2c, as Java's client makes it) does not cost the request its body;
    - what is no HTTP gets an error in OpenAI's shape.
    """

    head_timeout = 30.0
    """Seconds for a request's head, and for what a client still sends of a body that was refused."""
    write_timeout = 60.0
    """Seconds until what fills the connection's buffers has to be read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._running: Any = None  # the cycle that is answered; ``cycle`` is the last that was read
        self._ahead = 0
        self._spare = MAX_HEAD
        self._too_large = self._silent = False
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    # the connection -------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the client its time for a first request."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the request that runs; uvicorn tells the last that was read, and would go on with those between."""
        self._end_deadline()
        self._end_unread()
        self._abandon()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Nothing more fits before the client reads."""
        super().pause_writing()
        self._end_unread()
        self._unread = self.loop.call_later(self.write_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        self._end_unread()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        self._unset_keepalive_if_required()
        if self._busy and not self._running.more_body:
            self._ahead += len(data)
        self._spare -= len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._should_upgrade():
                self._end_deadline()
                self.handle_websocket_upgrade()
            else:
                self._stay(data[int(upgrade.args[0]) :])
            return
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._spare < 0:
            self._too_large = True
            self.send_400_response("")
        elif not self._busy:
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, and close."""
        begun = self._running is not None and self._running.response_started and not self._running.response_complete
        self._end_deadline()
        self._abandon()
        if not begun:  # else it would stand inside of another answer
            status, code = (431, "headers_too_large") if self._too_large else (400, "invalid_http")
            said = f"headers: larger than {MAX_HEAD} bytes" if self._too_large else "the request is no valid HTTP"
            body = json.dumps(ApiError(status, said, code=code).body).encode()
            self.transport.write(
                b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
                % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()

    # the parser's callbacks -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A request begins."""
        if not self._silent:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A part of its path."""
        if not self._silent:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers."""
        if not self._silent:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        if self._silent:
            return
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD:
            self._too_large = True
            raise ValueError("the head is too large")  # the parser makes its own error of it
        self._end_deadline()
        before, busy = self.cycle, self._busy
        super().on_headers_complete()
        if self.cycle is before:  # a web socket
            return
        if not busy:
            self._running = self.cycle
        elif self._ahead <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()  # a client is seen to leave only while its connection is read

    def on_body(self, body: bytes) -> None:
        """A part of its body."""
        self._spare += (1 + _FRAMING) * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """It is complete."""
        self._spare = MAX_HEAD
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Its answer is sent; the next one's turn."""
        self._running = self.pipeline[-1][0] if self.pipeline else self._running
        if not self.pipeline:
            self._ahead = 0
        super().on_response_complete()

    # parts ----------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def _abandon(self) -> None:
        """No answer can be sent any more."""
        self.pipeline.clear()
        if self._busy:
            self._running.disconnected = True
            self._running.message_event.set()

    def _stay(self, rest: bytes) -> None:
        """Read on as before, from a request that offered another protocol.

        The parser takes such a request for the last of its connection and leaves the body to the other protocol. A new
        one gets a head that says as much of the body as the old one's did, unheard.
        """
        names = (b"content-length", b"transfer-encoding")
        framing = [b"%b: %b\r\n" % (name, value) for name, value in self.headers if name in names]
        self.parser = httptools.HttpRequestParser(self)
        with contextlib.suppress(AttributeError):  # httptools < 0.6.3
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if framing:
            self.cycle.more_body = True
        self._silent = True
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        finally:
            self._silent = False
        if rest:
            self.data_received(rest)

    def _await_head(self) -> None:
        if self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(self.head_timeout, self._give_up)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._busy:
            self.transport.close()


def guarded(head_timeout: float, write_timeout: float) -> type[HttpToolsProtocol]:
    """The protocol with these limits, for ``uvicorn.Config(http=...)``; uvicorn's own where that has changed so much
    that they can't be kept, with a warning."""
    missing = [name for name in _NEEDS if not hasattr(HttpToolsProtocol, name)]
    if missing:
        warnings.warn(
            f"this uvicorn has no {', '.join(missing)}: headers, unread answers and pipelined requests have no limits; "
            "put a proxy before the server that has",
            DSparkWarning,
            stacklevel=2,
        )
        return HttpToolsProtocol
    return type("GuardedProtocol", (GuardedProtocol,), {"head_timeout": head_timeout, "write_timeout": write_timeout})
