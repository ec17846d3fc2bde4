"""A real vLLM server on loopback, for the tests that need one."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_kimi.engines.vllm import prepare_vllm_environment

MAX_MODEL_LEN = 1024
_START_S = 300


@dataclass(frozen=True)
class VllmServer:
    """`url` without a path; `log` is the server's own."""

    url: str
    log: Path

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer


@contextmanager
def running(target: Path, folder: Path, *arguments: str) -> Iterator[VllmServer]:
    """A server of `target` in float32; its processes end with the block."""
    prepare_vllm_environment()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--served-model-name",
        "tiny-kimi", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--attention-backend", "CPU_MLA",
        "--enforce-eager", "--max-model-len", str(MAX_MODEL_LEN), *arguments,
    ]  # fmt: skip
    server = VllmServer(f"http://127.0.0.1:{port}", folder / "server.log")
    with server.log.open("wb") as log:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        _wait_until_healthy(server, process)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait_until_healthy(server: VllmServer, process: subprocess.Popen[bytes]) -> None:
    for _ in range(2 * _START_S):
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(server.url + "/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise RuntimeError(f"the vLLM server did not start:\n{server.log.read_text()[-3000:]}")
