"""Which part of an answer a chain starts in: thoughts, answer, tool call, or a control token between them."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_kimi.hidden_states.feature_sample import FeatureSample
from eagle3_kimi.hidden_states.samples import Sample
from eagle3_kimi.protocol import SpanKind

SPAN_NAMES = (*(str(kind) for kind in SpanKind), "marker")
"""Names of the numbers in `read_span_kinds`; `marker`: control tokens, which belong to no span."""


def read_span_kinds(sample: Sample | FeatureSample) -> Tensor:
    """int64 [S-1-P]: for each target position P..S-2, the kind of the token after it, as an index of `SPAN_NAMES`.

    With P = 3 and the output `t t </think> a <end>` the positions 3..6 are followed by output tokens 1..4:

        t        </think>   a        <end>
        thought  marker     answer   marker
    """
    kinds = torch.full((len(sample.token_ids) - sample.num_prompt_tokens,), len(SPAN_NAMES) - 1)
    for span in sample.spans:
        kinds[span.start : span.end] = SPAN_NAMES.index(str(span.kind))
    return kinds[1:]
