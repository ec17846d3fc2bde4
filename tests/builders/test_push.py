"""`eagle3-kimi generate --push-to REPO --tag V`: the finished run of the other tests, replayed and pushed."""

from __future__ import annotations

from pathlib import Path

from tests.builders.conftest import Generated
from tests.hub.client import Client
from tests.hub.hub_server import running


def test_generate_pushes_what_it_wrote(generated: Generated, tmp_path: Path) -> None:
    options = {
        "target": generated.options["target"], "engine": "transformers", "max-tokens": "128",
        "validation-fraction": "0.3", "max-incomplete": "1.0", "max-truncated": "1.0",
        "journal-dir": generated.options["journal_dir"], "push-to": "me/samples", "tag": "v1",
    }  # fmt: skip
    flags = [text for name, value in options.items() for text in (f"--{name}", value)]
    generate = ["generate", generated.options["data_files"], "-o", tmp_path / "samples", *flags]
    before = generated.journal.read_bytes()
    with running() as hub:
        client = Client(hub, tmp_path / "home")
        pushed, again = client.run(generate, generate)
    assert pushed.code == 0, pushed.output
    assert generated.journal.read_bytes() == before  # nothing was generated again
    assert "me/samples v1 is commit" in pushed.output
    card = hub.repos["dataset", "me/samples"].commits[hub.repos["dataset", "me/samples"].tags["v1"]]["README.md"]
    complete = sum(map(len, generated.samples.values()))
    assert f"| samples | {complete} complete" in card.content.decode()
    assert again.code == 1
    assert "has the tag v1 already" in again.output
