"""One run of an engine in a process of its own: `python -m eagle3_kimi.evaluation.worker REQUEST.json REPORT.json`."""

from __future__ import annotations

import sys
from pathlib import Path

from eagle3_kimi.engines import check_engine_available
from eagle3_kimi.errors import Eagle3KimiError
from eagle3_kimi.evaluation.acceptance import AcceptanceReport, AcceptanceRequest, save_json
from eagle3_kimi.evaluation.child_process import ERROR_PREFIX
from eagle3_kimi.target import resolve_target


def run(request: AcceptanceRequest) -> AcceptanceReport:
    """Checks the drafter against the target and decodes with the engine that was asked for."""
    check_engine_available(request.engine)
    target = resolve_target(
        request.target, revision=request.target_revision, trust_remote_code=request.trust_remote_code
    )
    if request.drafter is not None:
        from eagle3_kimi.drafter.export_check import check_export
        from eagle3_kimi.drafter.loading import ENGINES

        check_export(Path(request.drafter), target, engines=("vllm",) if request.engine == "vllm" else ENGINES)
    if request.engine == "vllm":
        from eagle3_kimi.evaluation.served import serve

        return serve(target, request)
    from eagle3_kimi.evaluation.simulated import simulate

    return simulate(target, request)


def main(request: str, report: str) -> None:
    """Reads the request, writes the report; a foreseen failure is one line on standard error."""
    try:
        save_json(run(AcceptanceRequest.load(Path(request))), Path(report))
    except Eagle3KimiError as error:
        raise SystemExit(ERROR_PREFIX + " ".join(str(error).split())) from error


if __name__ == "__main__":
    main(*sys.argv[1:])
