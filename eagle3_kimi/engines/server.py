"""A running vLLM or SGLang server as an engine: token ids over HTTP, no text is parsed on either side.

    queue --> at most max_num_seqs requests, a thread each --> finished generations, one by one

A request that fails for good is a `Generation` with its error, so it reaches the quarantine. But first the server
has to generate something else: where it cannot, the run stops, and no request is blamed for it.
"""

from __future__ import annotations

import http
import logging
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from eagle3_kimi.chat import render_prompt
from eagle3_kimi.engines.base import (
    EngineInfo,
    EngineOptions,
    Generation,
    GenerationRequest,
    SamplingOptions,
    refuse_long_prompt,
)
from eagle3_kimi.engines.dialects import DIALECTS, Dialect
from eagle3_kimi.engines.http_client import HttpClient, HttpError, Patience
from eagle3_kimi.errors import EngineError, UsageError
from eagle3_kimi.target import Target, detect_preset

logger = logging.getLogger(__name__)

KEY_VARIABLE = "EAGLE3_KIMI_SERVER_KEY"
"""Environment variable with the server's API key."""

_QUESTION_TIMEOUT_S = 30.0
_PROBE = "Straße 北京, naïve café №5; if x != y: return x**2\n"


class ServerEngine:
    """Generates on a running server, whose model must be `target`.

    Raises:
        EngineError: nobody answers at `options.server_url`, or neither vLLM nor SGLang does, or its tokenizer
            is not the target's.
        UsageError: the address or the time a token is no such thing.
    """

    def __init__(self, target: Target, options: EngineOptions, *, patience: Patience | None = None) -> None:
        if options.server_seconds_per_token <= 0:
            raise UsageError(f"server_seconds_per_token must be above 0, got {options.server_seconds_per_token}")
        self._options, self._patience = options, patience or Patience()
        self._client = self._new_client()
        card = self._ask_model()
        self._model = str(card["id"])
        self._dialect = self._dialect_of(card)
        served_len = int(card.get("max_model_len") or target.config["max_position_embeddings"])
        self._max_model_len = min(served_len, options.max_model_len or served_len)
        self._probe = self._check_tokenizer(target)
        version = f"{self._dialect.name} {self._ask_version()}"
        self.info = EngineInfo(name="server", version=version, device="remote")

    def generate(
        self, queue: deque[GenerationRequest], sampling: SamplingOptions, stop_token_ids: tuple[int, ...]
    ) -> Iterator[Generation]:
        """See `TargetEngine.generate`.

        Raises:
            EngineError: the server generates nothing any more. What was in flight is for the next run.
        """
        self._client = client = self._new_client()
        finished: SimpleQueue[Future[Generation]] = SimpleQueue()
        in_flight: dict[Future[Generation], GenerationRequest] = {}
        pool = ThreadPoolExecutor(self._options.max_num_seqs, thread_name_prefix="generate")
        try:
            while queue or in_flight:
                while queue and len(in_flight) < self._options.max_num_seqs:
                    request = queue.popleft()
                    if refused := refuse_long_prompt(request, self._max_model_len):
                        yield refused
                        continue
                    future = pool.submit(self._answer, client, request, sampling, stop_token_ids)
                    in_flight[future] = request
                    future.add_done_callback(finished.put)
                if in_flight:
                    future = finished.get()
                    request = in_flight.pop(future)
                    try:
                        generation = future.result()
                    except HttpError as error:
                        self._check_server(client, sampling, error)
                        generation = _failure(request, str(error))
                    yield generation
        finally:
            client.abort()
            pool.shutdown()

    def close(self) -> None:
        """Breaks off what is still open; the server itself goes on."""
        self._client.abort()

    def _answer(
        self, client: HttpClient, request: GenerationRequest, sampling: SamplingOptions, stop: Sequence[int]
    ) -> Generation:
        dialect = self._dialect
        max_tokens = min(sampling.max_tokens, self._max_model_len - len(request.prompt_token_ids))
        body = dialect.build_body(self._model, request, sampling, max_tokens, stop)
        timeout_s = self._patience.least_timeout_s + max_tokens * self._options.server_seconds_per_token
        reply = client.request_patiently(dialect.generate_path, body, timeout_s=timeout_s)
        try:
            return dialect.read_reply(request, reply)
        except (KeyError, TypeError, IndexError, ValueError, AttributeError) as error:
            raise HttpError(f"the reply is not {dialect.name}'s: {type(error).__name__}: {error}") from error

    def _check_server(self, client: HttpClient, sampling: SamplingOptions, failure: HttpError) -> None:
        """After a failure: is it the request's own, or the server's? One token of another prompt tells."""
        try:
            self._answer(client, self._probe, replace(sampling, max_tokens=1), ())
        except HttpError as error:
            raise EngineError(
                f"the server generates nothing any more. A request failed with {failure}; one token of another "
                f"prompt with {error}. Check the log and the memory of the server at {self._options.server_url}. "
                "What is finished is kept: start the same command again when it runs."
            ) from error

    def _new_client(self) -> HttpClient:
        return HttpClient(self._options.server_url, key=os.environ.get(KEY_VARIABLE, ""), patience=self._patience)

    def _ask_model(self) -> dict[str, Any]:
        """The first model that the server lists; adapters on top of one are left out."""
        url = self._options.server_url
        try:
            reply = self._client.request("/v1/models", timeout_s=_QUESTION_TIMEOUT_S)
            return next(card for card in reply["data"] if not card.get("parent"))
        except HttpError as error:
            if error.status in {http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN}:
                advice = f"give its API key in the environment variable {KEY_VARIABLE}"
            else:
                advice = "is it started, has it loaded its model, is the address right (host and port, no path)?"
            raise EngineError(f"no model server at {url}: {error}; {advice}") from error
        except (KeyError, TypeError, AttributeError, StopIteration) as error:
            raise EngineError(
                f"{url}/v1/models lists no model; server_url should name a vLLM or SGLang server"
            ) from error

    def _dialect_of(self, card: dict[str, Any]) -> Dialect:
        owner = str(card.get("owned_by"))
        if owner not in DIALECTS:
            raise EngineError(
                f"the server at {self._options.server_url} calls itself {owner!r}; token ids are exchanged with "
                f"{' and '.join(DIALECTS)} only. Behind a gateway, give the address of the server itself."
            )
        return DIALECTS[owner]

    def _ask_version(self) -> str:
        for path in self._dialect.version_paths:
            try:
                return str(self._client.request(path, timeout_s=_QUESTION_TIMEOUT_S)["version"])
            except (HttpError, KeyError, TypeError):
                continue
        return "of unknown version"

    def _check_tokenizer(self, target: Target) -> GenerationRequest:
        """Lets the server write out a prompt's ids, since another tokenizer writes another text. Returns the prompt."""
        tokenizer = target.load_tokenizer()
        preset = detect_preset(tokenizer, target.config)
        ids = render_prompt(tokenizer, [{"role": "user", "content": _PROBE}], preset=preset)
        probe = GenerationRequest(id="probe", prompt_token_ids=ids, seed=0)
        body = {"model": self._model, "tokens": ids, "skip_special_tokens": False}
        try:
            reply = self._client.request("/detokenize", body, timeout_s=_QUESTION_TIMEOUT_S)
        except HttpError as error:
            if error.status in {http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED}:
                logger.warning("the server has no /detokenize: whether its tokenizer is %s's is unchecked", target.name)
                return probe
            text = str(error)
        else:
            text = str(reply.get("prompt", reply.get("text")))
        expected = str(tokenizer.decode(ids))
        if text.split() != expected.split():
            raise EngineError(
                f"the server's model {self._model} is not {target.name}: to its tokenizer the ids of {expected!r} "
                f"are {text[:200]!r}. Start the server with the target, or name the served model with --target."
            )
        return probe


def _failure(request: GenerationRequest, message: str) -> Generation:
    return Generation(
        request_id=request.id,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=[],
        finish_reason="error",
        error=message,
    )
