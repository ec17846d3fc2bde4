"""Checks one case of kind `hub`: what goes wrong between a finished stage and a version on the Hub.

Each kind of input goes to the function that guards it; a refusal is the verdict `reject`.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value
from huggingface_hub import DatasetCardData

from eagle3_kimi.captures import Verdict, judge
from eagle3_kimi.features import build_features
from eagle3_kimi.hidden_states.samples import SampleReader, SampleRef, plan_shares
from eagle3_kimi.hub.cards import check_no_loading_script
from eagle3_kimi.hub.dataset import check_features, write_parquet
from eagle3_kimi.hub.features import list_shards
from eagle3_kimi.training.batches import deal, plan_epoch
from tests.cases.checking import Came, check_case
from tests.hub.client import Client, Finished
from tests.hub.conftest import save_samples
from tests.hub.hub_server import running
from tests.hub.hub_state import Blob, Hub
from tests.hub.stores import REVISION, write_store
from tests.rows import complete_row

REPO = "me/case"


def check(case: dict[str, Any]) -> str | None:
    """See `check_case`."""
    return check_case(case, _RUNS)


def _repository_files(given: Came, came: Came) -> None:
    check_no_loading_script(REPO, given["repo_files"])


def _card_and_files(given: Came, came: Came) -> None:
    def features_of(columns: list[str] | dict[str, str]) -> Features:
        kinds = columns if isinstance(columns, dict) else dict.fromkeys(columns, "string")
        return Features({name: Value(kind) for name, kind in kinds.items()})

    info = {"config_name": "complete", "features": features_of(given["card_features"])._to_yaml_list()}
    card = f"---\n{DatasetCardData(dataset_info=[info]).to_yaml()}\n---\n"
    check_features(card, {"complete": features_of(given["shard_columns"])})


def _interrupted_push(given: Came, came: Came) -> None:
    """A push of a store of which the Hub has some shards already, uploaded or committed."""
    with tempfile.TemporaryDirectory() as folder, running() as hub:
        store = write_store(Path(folder) / "store", shards=given["shards"])
        shards = list_shards(store)
        for shard in shards[: max(given["uploaded"], given.get("committed", 0))]:
            hub.objects[shard.sha256] = shard.file.read_bytes()
        committed = {}
        for shard in shards[: given.get("committed", 0)]:
            committed[shard.file.name] = Blob(shard.file.read_bytes(), large=True)
            committed[shard.index_file.name] = Blob(shard.index_file.read_bytes(), large=False)
        if committed:
            label = b"---\neagle3_kimi: {kind: features, schema_version: 1, target: toy, target_revision: %b}\n---\n"
            card = Blob(label % REVISION.encode(), large=False)
            hub.create("dataset", REPO).commit({"README.md": card, **committed})
        (pushed,) = _run(hub, folder, ["push", "features", str(store), REPO, "--tag", "v1"])
        came["reupload"] = len(hub.uploads)
        resumed = given["uploaded"] and given.get("committed", 0) < given["shards"]
        came["verdict"] = "reject" if pushed.code else "repair" if resumed else "accept"


def _tool_arguments(given: Came, came: Came) -> None:
    """Arguments of any shape, from a captured response into a Parquet file and back."""
    rows, wanted = [], []
    for number, row in enumerate(given["rows"]):
        function = {"name": "f", "arguments": row["arguments"]}
        call = {"id": "functions.f:0", "type": "function", "function": function}
        message = {"role": "assistant", "reasoning": "think", "content": None, "tool_calls": [call]}
        (verdict,) = judge({"choices": [{"index": 0, "finish_reason": "tool_calls", "message": message}]})
        if verdict.verdict is Verdict.REJECT:
            came["verdict"] = "reject"
            return
        rows.append(complete_row(id=f"sample-{number}", tool_calls=json.dumps(list(verdict.tool_calls))))
        wanted.append(json.loads(row["arguments"]) if isinstance(row["arguments"], str) else row["arguments"])
    with tempfile.TemporaryDirectory() as folder:
        write_parquet({"train": Dataset.from_list(rows, features=build_features())}, Path(folder) / "complete")
        files = [str(file) for file in (Path(folder) / "complete").iterdir()]
        read = Dataset.from_parquet(files, cache_dir=f"{folder}/cache", keep_in_memory=True)
    stored = [json.loads(calls)[0]["function"]["arguments"] for calls in read["tool_calls"]]
    assert [json.loads(text) for text in stored] == wanted
    came["stored_as"] = "json_string" if read.features["tool_calls"] == Value("string") else "struct"


def _work_before_the_launch(given: Came, came: Came) -> None:
    """No launched process tokenises while others wait: text that is not token ids yet is refused at once."""
    unprepared = given["rank0_seconds"] > given["timeout_seconds"]
    row = {"messages": [{"role": "user", "content": "hi"}]} if unprepared else complete_row()
    with tempfile.TemporaryDirectory() as folder:
        DatasetDict({"train": Dataset.from_list([row])}).save_to_disk(folder)
        SampleReader(Path(folder))


def _gathered_samples(given: Came, came: Came) -> None:
    """Every sample once, on whatever number of processes: nothing is padded, so nothing is to be dropped."""
    count, world = given["dataset"], given["world"]
    dealt = deal(range(count), [1] * count, micro_batch_tokens=given["batch"], world_size=world)
    refs = [SampleRef(str(index), "train", index, 1, "", 0, 0, 0) for index in range(count)]
    shared = plan_shares(refs, world, window=given["batch"])
    kept = sorted(index for part in dealt for index in part)
    assert kept == sorted(ref.row for share in shared for ref in share) == list(range(count))
    came["kept"] = len(kept)


def _resumed_order(given: Came, came: Came) -> None:
    """The order is a function of seed and epoch alone; a resumed run whose epoch is another one shows another order."""
    plans = [
        plan_epoch(range(100), [1] * 100, batch_tokens=10, seed=0, epoch=epoch)
        for epoch in (given["epoch_saved"], given["sampler_epoch_after_resume"])
    ]
    came["verdict"] = "accept" if plans[0] == plans[1] else "reject"


def _access(given: Came, came: Came) -> None:
    """Pulling from a repository that may be private or gated, with a token in the environment."""
    with tempfile.TemporaryDirectory() as folder, running() as hub:
        samples = save_samples(Path(folder) / "samples", ["a", "b"])
        hub.create("dataset", REPO, private=given["private"], gated=bool(given.get("gated")))
        public = [] if given["private"] else ["--public"]
        pushed, pulled = _run(
            hub, folder,
            ["push", "dataset", str(samples), REPO, "--tag", "v1", *public],
            ["pull", "dataset", REPO, "--tag", "v1", "-o", f"{folder}/out"],
        )  # fmt: skip
        came["verdict"] = "reject" if pushed.code or pulled.code else "accept"
        reads = [token for method, path, token in hub.requests if method in ("GET", "HEAD") and "/resolve/" in path]
        came["send_token"] = bool(reads) and all(reads)


def _run(hub: Hub, folder: str, *commands: list[str]) -> list[Finished]:
    return Client(hub, Path(folder) / "home").run(*commands)


_RUNS: list[tuple[set[str], Callable[[Came, Came], None]]] = [
    ({"repo_files"}, _repository_files),
    ({"card_features", "shard_columns"}, _card_and_files),
    ({"shards", "uploaded"}, _interrupted_push),
    ({"rows"}, _tool_arguments),
    ({"rank0_seconds", "timeout_seconds"}, _work_before_the_launch),
    ({"dataset", "world", "batch"}, _gathered_samples),
    ({"epoch_saved", "sampler_epoch_after_resume"}, _resumed_order),
    ({"private"}, _access),
]
