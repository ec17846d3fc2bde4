"""What vLLM and SGLang servers are asked and how they answer, in token ids.

                    vLLM                                  SGLang
    asked           POST /v1/completions                  POST /generate
    prompt          prompt: [ids]                         input_ids: [ids]
    answer          choices[0].token_ids                  output_ids (both with the stop token)
    finish reason   choices[0].finish_reason              meta_info.finish_reason.type
    the prompt back choices[0].prompt_token_ids           meta_info.prompt_tokens (a count)
    version         GET /version                          GET /get_server_info

Both list their models at `/v1/models` and name themselves there (`owned_by`). SGLang's shapes are those of its
native API's documentation. Its seeds have an effect under `--enable-deterministic-inference` only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_kimi.engines.base import Generation, GenerationRequest, SamplingOptions

Body = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """How one kind of server is spoken to."""

    name: str
    generate_path: str
    version_paths: tuple[str, ...]
    """Tried in order: SGLang renamed its own."""
    build_body: Callable[[str, GenerationRequest, SamplingOptions, int, Sequence[int]], Body]
    """Model name, request, sampling, most tokens of this answer, stop ids -> what is posted."""
    read_reply: Callable[[GenerationRequest, Mapping[str, Any]], Generation]
    """Raises KeyError, TypeError, IndexError or ValueError on a reply of another shape."""


def _build_vllm_body(
    model: str, request: GenerationRequest, sampling: SamplingOptions, max_tokens: int, stop: Sequence[int]
) -> Body:
    return {
        "model": model,
        "prompt": request.prompt_token_ids,
        "max_tokens": max_tokens,
        "seed": request.seed,
        "stop_token_ids": list(stop),
        "return_token_ids": True,
        **_shared_sampling(sampling),
    }


def _build_sglang_body(
    _: str, request: GenerationRequest, sampling: SamplingOptions, max_tokens: int, stop: Sequence[int]
) -> Body:
    return {
        "input_ids": request.prompt_token_ids,
        "stream": False,
        "sampling_params": {
            "max_new_tokens": max_tokens,
            "sampling_seed": request.seed,
            "stop_token_ids": list(stop),
            **_shared_sampling(sampling),
        },
    }


def _shared_sampling(sampling: SamplingOptions) -> Body:
    """All that shapes the distribution, said aloud: a server fills gaps from the model's generation_config.json."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "skip_special_tokens": False,
    }


def _read_vllm_reply(request: GenerationRequest, reply: Mapping[str, Any]) -> Generation:
    (choice,) = reply["choices"]
    if choice.get("token_ids") is None:
        raise ValueError("no token_ids: this server does not know `return_token_ids` (vLLM has it since 0.10.2)")
    return Generation(
        request_id=request.id,
        prompt_token_ids=_ids(choice["prompt_token_ids"]),
        output_token_ids=_ids(choice["token_ids"]),
        finish_reason=str(choice["finish_reason"]),
    )


def _read_sglang_reply(request: GenerationRequest, reply: Mapping[str, Any]) -> Generation:
    meta = reply["meta_info"]
    if meta["prompt_tokens"] != len(request.prompt_token_ids):
        raise ValueError(f"{len(request.prompt_token_ids)} prompt tokens were sent, {meta['prompt_tokens']} counted")
    finish = meta["finish_reason"]
    aborted = finish["type"] == "abort"
    return Generation(
        request_id=request.id,
        prompt_token_ids=list(request.prompt_token_ids),
        output_token_ids=_ids(reply["output_ids"]),
        finish_reason=str(finish["type"]),
        error=f"the server aborted the request: {finish.get('message') or 'no reason given'}" if aborted else "",
    )


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise ValueError(f"token ids should be a list of integers, came {str(value)[:80]}")
    return value


DIALECTS = {
    dialect.name: dialect
    for dialect in (
        Dialect(
            name="vllm",
            generate_path="/v1/completions",
            version_paths=("/version",),
            build_body=_build_vllm_body,
            read_reply=_read_vllm_reply,
        ),
        Dialect(
            name="sglang",
            generate_path="/generate",
            version_paths=("/get_server_info", "/server_info"),
            build_body=_build_sglang_body,
            read_reply=_read_sglang_reply,
        ),
    )
}
"""By what a server calls itself."""
