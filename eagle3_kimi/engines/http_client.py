"""JSON over HTTP from many threads: patient with a busy server, quick to give up when told to.

Built on `http.client`, since a request that may take hours has to be broken off from another thread: closing
the connection is also what makes a server stop generating.
"""

from __future__ import annotations

import http.client
import json
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from eagle3_kimi.errors import UsageError

_CONNECT_TIMEOUT_S = 10.0
_WORTH_RETRYING = frozenset({408, 425, 429, 500, 502, 503, 504})
_MOST_SHOWN = 300
"""Characters of a server's error reply that a message repeats."""


class HttpError(Exception):
    """A request without a usable reply; the text is a clause for a person.

    Attributes:
        status: HTTP status, 0 where there was no reply.
        retry_after_s: what the server asked for; None where it did not.
        worth_retrying: whether the same request may do better in a while.
    """

    def __init__(
        self, message: str, *, status: int = 0, retry_after_s: float | None = None, worth_retrying: bool = False
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after_s, self.worth_retrying = status, retry_after_s, worth_retrying


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait for a server, and when to ask it again: after connection errors, 429 and 5xx."""

    attempts: int = 7
    """Times a request is sent in all; with the waits below, about a minute passes until it is given up."""
    first_wait_s: float = 1.0
    """Wait before the second attempt, then doubled; half to all of it, at random, so that requests spread out."""
    longest_wait_s: float = 60.0
    """Bound on a wait, also on one that the server asks for (`Retry-After`)."""
    least_timeout_s: float = 60.0
    """Time limit of a generation without its tokens: a long prompt, a full queue."""

    def wait_s(self, attempt: int, error: HttpError) -> float:
        """Seconds to wait after attempt number `attempt`, from 1."""
        if error.retry_after_s is not None:
            return min(self.longest_wait_s, error.retry_after_s)
        return min(self.longest_wait_s, self.first_wait_s * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)


class HttpClient:
    """One connection a request; after `abort`, every request fails at once.

    Args:
        url: base address, with or without a trailing `/v1`.
        key: sent as bearer token where not empty; never part of a message.
        patience: when a request is sent again.
    """

    def __init__(self, url: str, *, key: str = "", patience: Patience) -> None:
        parts = urlsplit(url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise UsageError(f"server_url: expected an address like http://127.0.0.1:8000, came {url!r}")
        self._https, self._host, self._port = parts.scheme == "https", parts.hostname, parts.port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        self._patience = patience
        self._aborted = threading.Event()
        self._lock = threading.Lock()
        self._open: set[http.client.HTTPConnection] = set()

    def request(self, path: str, body: Any = None, *, timeout_s: float) -> Any:
        """Sends `body` (POST; GET where it is None) once and returns the reply's JSON.

        Raises:
            HttpError: no reply, a status other than 200, or a reply that is no JSON.
        """
        try:
            status, headers, data = self._exchange(path, body, timeout_s)
        except TimeoutError as error:
            raise HttpError(f"no answer within {timeout_s:,.0f} s") from error
        except (OSError, http.client.HTTPException) as error:
            raise HttpError(f"{type(error).__name__}: {error}", worth_retrying=True) from error
        if status != http.HTTPStatus.OK:
            shown = " ".join(data.decode("utf-8", "replace").split())[:_MOST_SHOWN]
            raise HttpError(
                f"HTTP {status}: {shown}",
                status=status,
                retry_after_s=_seconds(headers.get("Retry-After")),
                worth_retrying=status in _WORTH_RETRYING,
            )
        try:
            return json.loads(data)
        except ValueError as error:
            raise HttpError(f"the reply is no JSON: {data[:80]!r}", status=status) from error

    def request_patiently(self, path: str, body: Any, *, timeout_s: float) -> Any:
        """As `request`, again while that is worth it. A time-out is not: the answer would be as long again."""
        attempt = 0
        while True:
            try:
                return self.request(path, body, timeout_s=timeout_s)
            except HttpError as error:
                attempt += 1
                if (
                    not error.worth_retrying
                    or attempt == self._patience.attempts
                    or self._aborted.wait(self._patience.wait_s(attempt, error))
                ):
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise HttpError(f"{error}{tries}", status=error.status) from error

    def abort(self) -> None:
        """Breaks off every open request, and those to come."""
        self._aborted.set()
        with self._lock:
            for connection in self._open:
                _shut_down(connection)

    def _exchange(self, path: str, body: Any, timeout_s: float) -> tuple[int, http.client.HTTPMessage, bytes]:
        make: Callable[..., http.client.HTTPConnection] = (
            http.client.HTTPSConnection if self._https else http.client.HTTPConnection
        )
        connection = make(self._host, self._port, timeout=_CONNECT_TIMEOUT_S)
        with self._lock:
            self._open.add(connection)
        try:
            try:
                connection.connect()
            except TimeoutError as error:
                raise ConnectionError(f"no connection within {_CONNECT_TIMEOUT_S:.0f} s") from error
            connection.sock.settimeout(timeout_s)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # hours may pass without a byte
            if self._aborted.is_set():
                raise ConnectionAbortedError("broken off")
            data = None if body is None else json.dumps(body).encode()
            connection.request("GET" if body is None else "POST", self._prefix + path, data, self._headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()


def _shut_down(connection: http.client.HTTPConnection) -> None:
    """Wakes the thread that waits on this connection; closing alone would not."""
    if connection.sock is not None:
        try:
            connection.sock.shutdown(socket.SHUT_RDWR)
        except OSError:  # already broken
            return


def _seconds(text: str | None) -> float | None:
    """A `Retry-After` in seconds; its form as a date is left alone."""
    return float(text) if text and text.isdecimal() else None
