"""The aux layers in the numberings of the two engines, and which tensors each would really capture.

    boundary id j:  the residual stream entering decoder layer j     vLLM, HF `hidden_states[j]`    (2, 30, 58)
    output id j:    what layer j puts out, so boundary id j + 1      SGLang's `eagle_config`        (1, 29, 57)

vLLM reads the top-level `eagle_aux_hidden_state_layer_ids`, and without it takes those of `eagle_config` *as they are*.
SGLang reads `eagle_config` alone. Either falls back to boundary ids (2, n // 2, n - 3).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from eagle3_kimi.drafter.config import default_aux_layer_ids, from_output_ids, to_output_ids
from eagle3_kimi.drafter.faults import Fault, FaultName
from eagle3_kimi.drafter.layouts import Layout
from eagle3_kimi.errors import DataError

KEY = "eagle_aux_hidden_state_layer_ids"


def number_for_engine(boundary_ids: Sequence[int], engine: str) -> list[int]:
    """Boundary ids as the engine's configuration wants them.

    Raises:
        DataError: SGLang has no number for boundary id 0, the embedding.
    """
    if engine == "vllm":
        return list(boundary_ids)
    if 0 in boundary_ids:
        raise DataError(f"SGLang numbers layers by output: boundary id 0 (the embedding) of {boundary_ids} has none")
    return to_output_ids(boundary_ids)


def write_layer_ids(boundary_ids: Sequence[int]) -> dict[str, Any]:
    """The keys that name the same tensors to both engines.

    Raises:
        DataError: see `number_for_engine`.
    """
    by_output = number_for_engine(boundary_ids, "sglang")
    return {KEY: list(boundary_ids), "eagle_config": {KEY: by_output, "use_aux_hidden_state": True}}


def captured_ids(config: Mapping[str, Any], engine: str, num_layers: int | None) -> list[int] | None:
    """Boundary ids of what the engine captures with this flat configuration; None: its default, for unknown layers."""
    nested = (config.get("eagle_config") or {}).get(KEY)
    if engine == "vllm":
        ids = config.get(KEY) or nested
    else:
        ids = from_output_ids(nested) if nested else None
    return list(ids) if ids else _default(num_layers)


def stated_ids(layout: Layout, num_layers: int | None) -> list[int] | None:
    """Boundary ids that the drafter was trained on, as far as its configuration tells.

    Ids in `eagle_config` alone are by output, as trainers write them, unless the layout is known for the contrary or
    they are the very default boundary ids.
    """
    if layout.config.get(KEY):
        return list(layout.config[KEY])
    nested = (layout.config.get("eagle_config") or {}).get(KEY)
    if not nested:
        return _default(num_layers)
    if nested == _default(num_layers) or not layout.nested_by_output:
        return list(nested)
    return from_output_ids(nested)


def find_layer_id_faults(
    config: Mapping[str, Any],
    engines: Collection[str],
    *,
    num_layers: int | None,
    trained: Sequence[int] | None,
) -> list[Fault]:
    """Compares what each engine captures with what the drafter was trained on.

    Args:
        config: flat.
        engines: those that are to serve it.
        num_layers: of the target, if known.
        trained: boundary ids; see `stated_ids`.
    """
    stated = list(trained) if trained else None
    faults = []
    for engine in engines:
        captured = captured_ids(config, engine, num_layers)
        if captured != stated:
            came = "its default" if captured is None else captured
            faults.append(
                Fault(
                    FaultName.LAYER_IDS_NAME_OTHER_TENSORS,
                    f"{engine} would capture boundary ids {came}, the drafter was trained on {stated}; write boundary "
                    f"ids to {KEY} and ids by output (one less) to eagle_config.{KEY}",
                )
            )
        faults += _range_faults(captured or stated, engine, num_layers)
    if not stated and num_layers is not None:
        faults.append(
            Fault(FaultName.LAYER_IDS_OUT_OF_RANGE, f"no ids are given, and {num_layers} layers have no default")
        )
    return faults


def _range_faults(ids: list[int] | None, engine: str, num_layers: int | None) -> list[Fault]:
    """Both engines capture in the order of the layers; SGLang, on entering one, so never the last output."""
    if ids is None:
        return []
    last = None if num_layers is None else num_layers - (engine == "sglang")
    if ids == sorted(set(ids)) and ids[0] >= 1 and (last is None or ids[-1] <= last):
        return []
    top = "n" if last is None else last
    sentence = f"{engine} captures boundary ids within 1..{top}, low to high and each once; these are {ids}"
    return [Fault(FaultName.LAYER_IDS_OUT_OF_RANGE, sentence)]


def _default(num_layers: int | None) -> list[int] | None:
    try:
        return None if num_layers is None else list(default_aux_layer_ids(num_layers))
    except DataError:
        return None
