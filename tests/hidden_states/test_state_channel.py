from __future__ import annotations

import pytest
import torch

from eagle3_kimi.errors import EngineError
from eagle3_kimi.hidden_states.sink import CapturedStates, find_sink
from eagle3_kimi.hidden_states.state_channel import StateChannel, StateSender


def captured(name: str, length: int, dtype: torch.dtype = torch.float32) -> CapturedStates:
    generator = torch.Generator().manual_seed(length)
    states = torch.randn(length, 4, 8, generator=generator).to(dtype)
    return CapturedStates(name, torch.randint(0, 1 << 40, (length,), generator=generator), states)


def take(channel: StateChannel, count: int) -> list[CapturedStates]:
    found: list[CapturedStates] = []
    while len(found) < count:
        found += channel.take(wait=True)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_put_arrives_in_order(dtype: torch.dtype) -> None:
    channel = StateChannel()
    sender = find_sink(channel.name, sends=True)
    sent = [
        captured(f"sample-{length}", length, dtype) for length in (3, 1, 20_000)
    ]  # the last is larger than a buffer
    for states in sent:
        sender.put(states)
    for came, expected in zip(take(channel, 3), sent, strict=True):
        assert came.id == expected.id
        assert torch.equal(came.token_ids, expected.token_ids)
        assert torch.equal(came.hidden_states, expected.hidden_states)
        assert came.hidden_states.dtype == dtype
    assert channel.take() == []
    channel.close()


def test_ranks_without_states_do_not_connect() -> None:
    channel = StateChannel()
    find_sink(channel.name, sends=False).put(CapturedStates("other rank", torch.arange(3), None))
    find_sink(channel.name, sends=True).put(captured("first rank", 3))
    assert [states.id for states in take(channel, 1)] == ["first rank"]
    channel.close()


def test_the_end_of_the_sender_is_an_error_for_who_waits_and_after_what_it_had_sent() -> None:
    channel = StateChannel()
    sender = StateSender(channel.name)
    sender.put(captured("whole", 4))
    assert [states.id for states in take(channel, 1)] == ["whole"]
    sender._socket.sendall(b"\x10\x00")  # killed in the middle of a message
    sender._socket.close()
    with pytest.raises(EngineError, match="process ended before"):
        channel.take(wait=True)
    channel.close()


def test_a_channel_that_nobody_joined_is_closed() -> None:
    channel = StateChannel()
    channel.close()
    with pytest.raises(FileNotFoundError):
        find_sink(channel.name, sends=True)
