"""`--push-to REPO --tag V` of the launched stages: the main process pushes what the stage made, after its checks.

The other processes do not wait for it: an upload takes longer than any collective may. They are done.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from eagle3_kimi.hidden_states.config import ExtractConfig
from eagle3_kimi.hub.repository import check_destination
from eagle3_kimi.training.config import LiveOptions, TrainConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PushOptions:
    """Where the result of a stage goes on the Hub."""

    push_to: str | None = None
    """Repository (NAMESPACE/NAME) that gets the result as a new version; None: it stays here."""
    tag: str | None = None
    """Name of that version, such as v1.2.0; goes with `push_to`."""
    public: bool = False
    """Create the repository for everyone to see."""


def extract_and_push(config: ExtractConfig, push: PushOptions) -> None:
    """`extract_hidden_states`, then the store to the Hub."""
    from eagle3_kimi.hidden_states.extract import extract_hidden_states
    from eagle3_kimi.hub.features import push_features

    if is_main_process():
        check_destination(push.push_to, push.tag, "dataset")
    extract_hidden_states(config)
    if push.push_to and push.tag and is_main_process():
        logger.info("%s", push_features(config.output, push.push_to, tag=push.tag, private=not push.public))


def train_and_push(config: TrainConfig, live: LiveOptions, push: PushOptions) -> None:
    """`train_drafter`, then the exported drafter to the Hub."""
    from eagle3_kimi.hub.drafter import push_drafter
    from eagle3_kimi.target import resolve_target
    from eagle3_kimi.training.trainer import train_drafter

    if is_main_process():
        check_destination(push.push_to, push.tag, "model")
    train_drafter(config, live)
    if push.push_to and push.tag and is_main_process():
        target = resolve_target(config.target, trust_remote_code=config.trust_remote_code)
        drafter = config.output / "export"
        published = push_drafter(drafter, push.push_to, tag=push.tag, target=target, private=not push.public)
        logger.info("%s", published)


def is_main_process() -> bool:
    """By the launcher's own variable: before the run no group is joined yet, after it none may be needed."""
    return int(os.environ.get("RANK", "0")) == 0
