"""What can be wrong with a drafter directory. The names are stable: programs may rely on them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class FaultName(StrEnum):
    """Each fault, in the order in which it is looked for."""

    MALFORMED_CONFIG = "malformed_config"
    ARCHITECTURE_NOT_EAGLE3 = "architecture_not_eagle3"
    INVALID_SPECULATORS_CONFIG = "invalid_speculators_config"
    LAYOUT_UNKNOWN_TO_ENGINE = "layout_unknown_to_engine"
    MORE_THAN_ONE_LAYER = "more_than_one_layer"
    MISSING_DRAFT_VOCAB_SIZE = "missing_draft_vocab_size"
    VOCAB_SIZE_DIFFERS = "vocab_size_differs"
    MISSING_TARGET_HIDDEN_SIZE = "missing_target_hidden_size"
    TARGET_HIDDEN_SIZE_DIFFERS = "target_hidden_size_differs"
    DRAFT_CONTEXT_TOO_SHORT = "draft_context_too_short"
    ROPE_SCHEMAS_DISAGREE = "rope_schemas_disagree"
    ROPE_DIFFERS_FROM_TARGET = "rope_differs_from_target"
    WRITE_BOTH_ROPE_SCHEMAS = "write_both_rope_schemas"
    LAYER_IDS_NAME_OTHER_TENSORS = "layer_ids_name_other_tensors"
    LAYER_IDS_OUT_OF_RANGE = "layer_ids_out_of_range"
    LAYER_IDS_COUNT = "layer_ids_count"
    EXTRA_NORMS = "extra_norms"
    TIED_EMBEDDINGS = "tied_embeddings"
    BIASES = "biases"
    NO_AUX_HIDDEN_STATES = "no_aux_hidden_states"
    QUANTISED = "quantised"
    MISSING_CONFIG_KEYS = "missing_config_keys"
    TRAINING_CHECKPOINT = "training_checkpoint"
    TENSOR_NAMES_UNKNOWN_TO_ENGINE = "tensor_names_unknown_to_engine"
    MISSING_TENSORS = "missing_tensors"
    MISSING_LM_HEAD = "missing_lm_head"
    MISSING_EMBED_TOKENS = "missing_embed_tokens"
    MISSING_D2T = "missing_d2t"
    D2T_WITHOUT_REDUCTION = "d2t_without_reduction"
    SHAPE_DIFFERS = "shape_differs"
    CAST_TO_DECLARED_DTYPE = "cast_to_declared_dtype"
    NOT_FINITE = "not_finite"
    D2T_HOLDS_IDS = "d2t_holds_ids"
    D2T_OUT_OF_RANGE = "d2t_out_of_range"
    D2T_REPEATS = "d2t_repeats"
    D2T_T2D_DISAGREE = "d2t_t2d_disagree"


_REPAIRABLE = {FaultName.WRITE_BOTH_ROPE_SCHEMAS, FaultName.CAST_TO_DECLARED_DTYPE}


@dataclass(frozen=True)
class Fault:
    """One finding: its name, and a sentence that says what came and what an engine would make of it."""

    name: FaultName
    sentence: str

    @property
    def repairable(self) -> bool:
        """Whether engines serve the directory today, and writing it again without loss ends the fault."""
        return self.name in _REPAIRABLE

    def __str__(self) -> str:
        return f"{self.name}: {self.sentence}"


def verdict_of(faults: Iterable[Fault]) -> Literal["accept", "repair", "reject"]:
    """`accept` without faults, `repair` where all of them are repairable, else `reject`."""
    repairable = [fault.repairable for fault in faults]
    if not repairable:
        return "accept"
    return "repair" if all(repairable) else "reject"
