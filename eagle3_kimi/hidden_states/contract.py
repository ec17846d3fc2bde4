"""Are these the states training needs? Checked on the first samples, and on some of the later ones.

Two anchors. The layer numbering: boundary 1 is captured too and must equal the embedding sent through layer 0. The
final state: `lm_head(norm(h))` must explain the token that follows. If a check fails, the known mistakes are tried, and
the one that fits is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from eagle3_kimi.errors import DataError
from eagle3_kimi.hidden_states.final_states import FinalStates
from eagle3_kimi.hidden_states.layer_anchor import ANCHOR_LAYER_ID, LayerAnchor
from eagle3_kimi.hidden_states.target_head import TargetHead
from eagle3_kimi.target import Target

__all__ = ["ANCHOR_LAYER_ID", "ContractCheck", "ContractReport", "ContractSample", "check_contract"]


@dataclass(frozen=True)
class ContractSample:
    """One captured sample. S tokens, P of them prompt."""

    id: str
    token_ids: Tensor
    """int64 [S]."""
    num_prompt_tokens: int
    anchor: Tensor
    """[S-1, H], what came as boundary 1."""
    final: Tensor
    """[S-1, H], what came as the final state."""


@dataclass(frozen=True, kw_only=True)
class ContractReport:
    """The verdict; its fields are stored in the manifest."""

    passed: bool
    agreement: float
    """Share of produced tokens that are the target's own first choice, from the captured final state."""
    anchor_error: float
    """Median relative error of what came as boundary 1."""
    mean_log_prob: float
    """Of the produced tokens, at the sampling temperature."""
    mean_entropy: float
    """Of the target's distributions there: what `-mean_log_prob` should be for tokens it sampled."""
    samples: int
    tokens: int
    fault: str
    """The known mistake that fits; empty when passed."""

    def as_dict(self) -> dict[str, Any]:
        """For `StoreManifest.contract`."""
        return asdict(self)

    def raise_if_failed(self) -> None:
        """Raises `DataError` naming the fault."""
        if not self.passed:
            raise DataError(
                f"the captured hidden states failed the contract check on {self.samples} samples: {self.fault} "
                f"(boundary 1 off by {self.anchor_error:.2g}, agreement {self.agreement:.1%}, "
                f"log-probability {self.mean_log_prob:.2f} against an entropy of {self.mean_entropy:.2f}). "
                "Nothing was stored"
            )


class ContractCheck:
    """Checks captured samples of one target; what it reads from the checkpoint is read once.

    Args:
        target: where layer 0 and the embedding are read from.
        head: the target's norm and head.
        dtype: `float32` or `bfloat16`, of the captured states.
        temperature: the sampling temperature of the produced tokens; 0 is greedy.
        tensor_parallel_size: processes that shared the target's layers.
    """

    def __init__(
        self, target: Target, head: TargetHead, *, dtype: str, temperature: float, tensor_parallel_size: int = 1
    ) -> None:
        self._head, self._temperature = head, temperature
        self._anchor = LayerAnchor(target, dtype=dtype, tensor_parallel_size=tensor_parallel_size)

    def check(self, samples: Sequence[ContractSample]) -> ContractReport:
        """Checks at least one sample; never raises for bad states, see `ContractReport.raise_if_failed`."""
        tokens = [sample.token_ids for sample in samples]
        anchor_error, anchor_fault = self._anchor.check(tokens, [sample.anchor for sample in samples])
        final = FinalStates(
            token_ids=tokens,
            num_prompt_tokens=[sample.num_prompt_tokens for sample in samples],
            states=[sample.final for sample in samples],
            head=self._head,
            temperature=self._temperature,
        )
        reading = final.read()
        fault = anchor_fault or final.find_fault()  # wrong layers end in a wrong final state: one cause, named once
        return ContractReport(
            passed=not fault,
            agreement=reading.agreement,
            anchor_error=anchor_error,
            mean_log_prob=reading.log_prob,
            mean_entropy=reading.entropy,
            samples=len(samples),
            tokens=reading.tokens,
            fault=fault,
        )


def check_contract(
    samples: Sequence[ContractSample],
    target: Target,
    head: TargetHead,
    *,
    dtype: str,
    temperature: float,
    tensor_parallel_size: int = 1,
) -> ContractReport:
    """One check of `samples`; the arguments are those of `ContractCheck`."""
    check = ContractCheck(target, head, dtype=dtype, temperature=temperature, tensor_parallel_size=tensor_parallel_size)
    return check.check(samples)
