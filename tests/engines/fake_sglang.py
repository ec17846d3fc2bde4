"""An SGLang server's HTTP edge, from its documented shapes, on a free port; faults are scripted."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]
Fault = Callable[["FakeSglang"], Reply | None]
"""What one request gets instead of an answer; None breaks the connection off."""


def as_json(body: Any, status: int = 200, **headers: str) -> Reply:
    return status, headers, json.dumps(body).encode()


class FakeSglang:
    """Answers every prompt with `answer`, unless the next of `faults` comes first. Probes (one token) have none."""

    def __init__(self, tokenizer: Any, answer: list[int]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.faults: deque[Fault | None] = deque()
        self.poison: set[int] = set()
        """Prompts that begin so always get a 500."""
        self.broken = False
        """Every request gets a 500."""
        self.asked: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.card: dict[str, Any] = {"id": "kimi", "object": "model", "owned_by": "sglang", "max_model_len": 4096}
        self.detokenize = True
        self.finish: dict[str, Any] = {"type": "stop", "matched": answer[-1]}
        self.gate = threading.Event()
        """Generations wait for it; set from the start."""
        self.gate.set()
        self.running = self.most_running = 0
        self.hung_up = threading.Event()
        """Set when somebody was gone before the answer."""
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def get(self, path: str) -> Reply:
        if path == "/v1/models":
            return as_json({"object": "list", "data": [self.card]})
        return as_json({"version": "0.5.6"}) if path == "/get_server_info" else as_json({}, 404)

    def post(self, path: str, body: dict[str, Any]) -> Reply | None:
        if path == "/detokenize" and self.detokenize:
            return as_json({"text": self.tokenizer.decode(body["tokens"])})
        if path != "/generate":
            return as_json({"detail": "Not Found"}, 404)
        with self._lock:
            self.asked.append(body)
            probe = body["sampling_params"]["max_new_tokens"] == 1
            fault = self.faults.popleft() if self.faults and not probe else None
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        try:
            self.gate.wait(20)
            if self.broken or body["input_ids"][0] in self.poison:
                return as_json({"error": {"message": "scripted 500"}}, 500)
            return fault(self) if fault else as_json(self.reply(len(body["input_ids"])))
        finally:
            with self._lock:
                self.running -= 1

    def reply(self, num_prompt_tokens: int) -> dict[str, Any]:
        meta = {
            "id": "5a3b", "finish_reason": self.finish, "prompt_tokens": num_prompt_tokens,
            "completion_tokens": len(self.answer), "cached_tokens": 0, "weight_version": "default",
        }  # fmt: skip
        text = self.tokenizer.decode(self.answer[:-1])
        return {"text": text, "output_ids": self.answer, "meta_info": meta}

    def close(self) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running(tokenizer: Any, answer: list[int]) -> Iterator[FakeSglang]:
    server = FakeSglang(tokenizer, answer)
    try:
        yield server
    finally:
        server.close()


def _handler_of(fake: FakeSglang) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(fake.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fake.headers.append(dict(self.headers))
            self._send(fake.post(self.path, body))

        def _send(self, reply: Reply | None) -> None:
            ready, _, _ = select.select([self.connection], [], [], 0)
            if ready and not self.connection.recv(1, socket.MSG_PEEK):
                fake.hung_up.set()
                return
            if reply is None:
                self.connection.close()
                return
            status, headers, data = reply
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    return Handler
