"""Hidden states from the process of vLLM's worker to this one, over a socket of this machine.

An engine that generates keeps its worker in a process of its own, so the connector cannot reach a queue of ours. Its
end (`StateSender`) and ours (`StateChannel`) each have a thread: neither an engine step nor a loop of ours ever waits
for the other process, and nothing touches the disk. A message is one finished request:

    length of the header (4 bytes) | header (JSON: id, shape, dtype) | token ids (int64) | hidden states
"""

from __future__ import annotations

import json
import queue
import socket
import struct
import tempfile
import threading
from pathlib import Path

import torch
from torch import Tensor

from eagle3_kimi.errors import EngineError
from eagle3_kimi.hidden_states.sink import CHANNEL_PREFIX, CapturedStates

_LENGTH = struct.Struct("<I")
_SECONDS_WITHOUT_STATES = 600.0
"""No request's states are on their way for so long: the longest is some gigabytes."""


class StateChannel:
    """This process's end. Use as a context manager, or call `close`."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eagle3-kimi-")  # readable by this user alone
        address = str(Path(self._folder.name) / "states")
        self.name = CHANNEL_PREFIX + address
        """What the connector finds the channel by."""
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(address)
        self._server.listen(1)
        self._arrived: queue.SimpleQueue[CapturedStates | None] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="hidden-states", daemon=True).start()

    def take(self, *, wait: bool = False) -> list[CapturedStates]:
        """All that has arrived since the last call.

        Args:
            wait: at least one.

        Raises:
            EngineError: nothing can come any more, since the sender's process ended.
        """
        found: list[CapturedStates] = []
        try:
            while True:
                first = wait and not found
                states = self._arrived.get(timeout=_SECONDS_WITHOUT_STATES) if first else self._arrived.get_nowait()
                if states is None:
                    raise EngineError("the engine's process ended before it had sent all hidden states")
                found.append(states)
        except queue.Empty:
            if wait and not found:
                raise EngineError(
                    f"the engine has sent no hidden states for {_SECONDS_WITHOUT_STATES:.0f} s, though requests of it "
                    "are finished; run again: what is in the journal is not generated again"
                ) from None
        return found

    def close(self) -> None:
        """Stops listening; what has arrived is dropped."""
        with socket.socket(socket.AF_UNIX) as nobody:  # the thread may still wait for a sender
            nobody.connect(self.name.removeprefix(CHANNEL_PREFIX))
        self._server.close()
        self._folder.cleanup()

    def _receive(self) -> None:
        try:
            connection, _ = self._server.accept()
            with connection:
                while True:
                    self._arrived.put(_receive_states(connection))
        except OSError:  # the sender's process ended, or this end was closed
            self._arrived.put(None)


class StateSender:
    """The connector's end.

    Args:
        name: of the channel.
    """

    def __init__(self, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(name.removeprefix(CHANNEL_PREFIX))
        self._waiting: queue.SimpleQueue[CapturedStates] = queue.SimpleQueue()
        self._failure: OSError | None = None
        threading.Thread(target=self._send, name="hidden-states", daemon=True).start()

    def put(self, states: CapturedStates) -> None:
        """Queues a request's states; returns at once.

        Raises:
            EngineError: earlier ones could not be sent.
        """
        if self._failure is not None:
            raise EngineError(f"hidden states could not be sent to the process that asked for them: {self._failure}")
        self._waiting.put(states)

    def _send(self) -> None:
        try:
            while True:
                _send_states(self._socket, self._waiting.get())
        except OSError as error:
            self._failure = error


def _send_states(connection: socket.socket, states: CapturedStates) -> None:
    assert states.hidden_states is not None  # the ranks that have none do not send
    shape, dtype = list(states.hidden_states.shape), str(states.hidden_states.dtype).removeprefix("torch.")
    header = json.dumps({"id": states.id, "shape": shape, "dtype": dtype}).encode()
    connection.sendall(_LENGTH.pack(len(header)) + header)
    for tensor in (states.token_ids, states.hidden_states):
        connection.sendall(_bytes_of(tensor.contiguous()))


def _receive_states(connection: socket.socket) -> CapturedStates:
    length = bytearray(_LENGTH.size)
    _receive_into(connection, memoryview(length))
    text = bytearray(_LENGTH.unpack(length)[0])
    _receive_into(connection, memoryview(text))
    header = json.loads(text)
    token_ids = torch.empty(header["shape"][0], dtype=torch.int64)
    hidden_states = torch.empty(header["shape"], dtype=getattr(torch, header["dtype"]))
    for tensor in (token_ids, hidden_states):
        _receive_into(connection, _bytes_of(tensor))
    return CapturedStates(header["id"], token_ids, hidden_states)


def _receive_into(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError("the sender closed the connection")
        view = view[count:]


def _bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory; NumPy knows no bfloat16."""
    return tensor.view(torch.uint8).numpy().data.cast("B")
