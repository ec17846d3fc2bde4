"""What `huggingface_hub` raises, as one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx

from eagle3_kimi.errors import Eagle3KimiError, HubError, UsageError


@contextmanager
def hub_errors(repo_id: str) -> Iterator[None]:
    """Around calls of the client; our own errors pass."""
    again = "what was uploaded stays there: run the same command again"
    try:
        yield
    except Eagle3KimiError:
        raise
    except HFValidationError as error:
        raise UsageError(f"{repo_id!r} is no repository name; expected NAMESPACE/NAME") from error
    except LocalTokenNotFoundError as error:
        raise HubError("no Hugging Face token: run `hf auth login` or set HF_TOKEN") from error
    except OfflineModeIsEnabled as error:
        raise HubError(f"{repo_id} is on the Hub, and HF_HUB_OFFLINE forbids to reach it") from error
    except LocalEntryNotFoundError as error:
        raise HubError(f"{repo_id} is not in the local cache under this tag, and the Hub cannot be reached") from error
    except GatedRepoError as error:
        raise HubError(f"{repo_id} is gated: ask for access on its page, with the account of your token") from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"there is no repository {repo_id} that you may see; check the name, and your token (`hf auth whoami`)"
        ) from error
    except EntryNotFoundError as error:
        raise HubError(f"{repo_id} lacks a file that belongs to it: {_first_line(error)}") from error
    except HfHubHTTPError as error:
        raise HubError(_refusal(repo_id, error)) from error
    except httpx.TransportError as error:
        raise HubError(f"the Hub cannot be reached ({_first_line(error)}); {again}") from error
    except RuntimeError as error:  # how the client reports an upload that failed
        raise HubError(f"an upload to {repo_id} failed ({_first_line(error)}); {again}") from error


def _refusal(repo_id: str, error: HfHubHTTPError) -> str:
    status = error.response.status_code
    if status in (401, 403):
        return f"{repo_id} needs a token with write access (`hf auth login`, or HF_TOKEN): {_first_line(error)}"
    if status in (409, 412):
        return (
            f"another push to {repo_id} came in between ({error.server_message or _first_line(error)}); look at it, "
            "then run the same command again"
        )
    return f"the Hub answered {status} for {repo_id} ({error.server_message or _first_line(error)}); try again later"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
