"""Acceptance of a drafter: served in vLLM, or simulated with transformers."""

from __future__ import annotations

from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest, measure_acceptance

__all__ = ["AcceptanceReport", "AcceptanceRequest", "measure_acceptance"]
