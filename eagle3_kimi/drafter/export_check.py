"""The check of a drafter directory: what vLLM and SGLang would make of it, without starting either.

    config.json --read_layout--> flat configuration --config_check, layer_ids--.
    *.safetensors (headers) -----------------------> tensor_check -------------+--> faults
    *.safetensors (values) ------------------------> vocabulary map, NaN ------'

Nothing here is silent: engines skip unknown names, leave missing tensors random, and read different keys for one thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_kimi.drafter.config_check import find_config_faults
from eagle3_kimi.drafter.config_types import find_type_faults
from eagle3_kimi.drafter.faults import Fault, FaultName, verdict_of
from eagle3_kimi.drafter.folder import DrafterFolder, TensorFacts
from eagle3_kimi.drafter.layer_ids import captured_ids, find_layer_id_faults, stated_ids
from eagle3_kimi.drafter.layouts import Trunk, find_speculators_faults, read_layout
from eagle3_kimi.drafter.loading import ENGINES, count_aux_states, find_trunk
from eagle3_kimi.drafter.tensor_check import find_tensor_faults, find_value_faults
from eagle3_kimi.errors import DataError, UsageError
from eagle3_kimi.target import Target


def check_export(path: Path, target: Target, *, engines: Sequence[str] = ENGINES) -> None:
    """Refuses a drafter directory that an engine would load wrongly without a word.

    Raises:
        DataError: with every fault found.
    """
    faults = find_folder_faults(path, target=target.config, engines=engines)
    if faults:
        raise DataError(f"the drafter in {path} would not serve {target.name}: " + "; ".join(map(str, faults)))


def find_folder_faults(
    path: Path, *, target: Mapping[str, Any] | None = None, engines: Sequence[str] = ENGINES
) -> list[Fault]:
    """Everything that is wrong with a drafter directory.

    Args:
        path: the directory, in any of the published layouts.
        target: the target's text configuration; None leaves out what only it can tell.
        engines: those that are to serve it.

    Raises:
        UsageError: an engine is unknown, or there is no config.json.
        DataError: a file cannot be read.
    """
    unknown = [engine for engine in engines if engine not in ENGINES]
    if unknown or not engines:
        raise UsageError(f"the engines are {', '.join(ENGINES)}, not {', '.join(unknown) or 'none'}")
    folder = DrafterFolder(path)
    faults = find_faults(folder.config, folder.tensors, target=target, engines=engines)
    if verdict_of(faults) != "reject":  # values are only looked at once every tensor is where it should be
        faults += find_value_faults(read_layout(folder.config).config, folder.read())
    return faults


def find_faults(
    config: Mapping[str, Any],
    tensors: Mapping[str, TensorFacts] | None,
    *,
    target: Mapping[str, Any] | None = None,
    engines: Sequence[str] = ENGINES,
    trained_layer_ids: Sequence[int] | None = None,
) -> list[Fault]:
    """What a `config.json` and the headers of the weights show; the first faults are the ones to mend first.

    Args:
        config: `config.json`.
        tensors: every tensor, None where they are not at hand.
        target: what is known of the target's text configuration.
        engines: those that are to serve the drafter.
        trained_layer_ids: boundary ids, where they are known from elsewhere.
    """
    faults = find_type_faults(config)
    if faults:
        return faults
    target = target or {}
    layout = read_layout(config, tensors or ())
    if layout.is_speculators:
        faults = find_speculators_faults(config, has_weights=tensors is not None)
        if "sglang" in engines:
            sentence = "SGLang does not read the speculators layout: sizes nested, tensors named layers.0.*; convert it"
            faults.append(Fault(FaultName.LAYOUT_UNKNOWN_TO_ENGINE, sentence))
        if faults:
            return faults
    trunks: dict[str, Trunk] = {}
    for engine in engines:
        trunk = find_trunk(layout, engine)
        if trunk is None:
            given = f"{layout.config.get('architectures')} with model_type {layout.config.get('model_type')}"
            sentence = f"{engine} has no EAGLE-3 drafter for architectures {given}"
            faults.append(Fault(FaultName.ARCHITECTURE_NOT_EAGLE3, sentence))
        else:
            trunks[engine] = trunk
    if faults:
        return faults
    num_layers = target.get("num_hidden_layers")
    faults = find_config_faults(layout.config, engines, trunks[engines[0]], target)
    trained = trained_layer_ids or stated_ids(layout, num_layers)
    faults += find_layer_id_faults(layout.config, engines, num_layers=num_layers, trained=trained)
    faults += _find_count_faults(layout.config, trunks, num_layers)
    if tensors is not None:
        faults += find_tensor_faults(layout.config, tensors, trunks, target)
    return list(dict.fromkeys(faults))


def _find_count_faults(config: Mapping[str, Any], trunks: Mapping[str, Trunk], num_layers: int | None) -> list[Fault]:
    faults = []
    for engine, trunk in trunks.items():
        captured, taken = captured_ids(config, engine, num_layers), count_aux_states(config, engine, trunk)
        if captured is not None and len(captured) != taken:
            sentence = f"{engine} captures {len(captured)} aux hidden states {captured}, its fc takes {taken}"
            faults.append(Fault(FaultName.LAYER_IDS_COUNT, sentence))
    return faults
