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
from collections.abc import Iterator, Mapping
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

    def read_counter(self, name: str) -> float:
        """Of the server's metrics; summed over its labels."""
        with urllib.request.urlopen(self.url + "/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((name + "{", name + " ")))


_PLUGIN = """
def register():
    import eagle3_kimi.evaluation.cpu_attention, eagle3_kimi.evaluation.cpu_sampling
"""


def write_drafting_plugin(folder: Path) -> Path:
    """A vLLM plugin: what a CPU needs to serve an MLA target with a drafter. For PYTHONPATH of all its processes."""
    about = folder / "cpu_drafting-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-drafting\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_drafting = cpu_drafting:register\n")
    (folder / "cpu_drafting.py").write_text(_PLUGIN)
    return folder


@contextmanager
def running(
    target: Path, folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[VllmServer]:
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
        variables = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
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
