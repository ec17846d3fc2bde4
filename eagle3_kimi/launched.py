"""What every script under `train/` does: a config file, then flags, one call, errors as one sentence."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import FrameType

from eagle3_kimi.errors import Eagle3KimiError, RunStopped


def run_launched(
    config_classes: type | tuple[type, ...],
    function: Callable[..., object],
    description: str,
    args: Sequence[str] | None = None,
    *,
    example: str = "",
) -> None:
    """Parses `--config FILE` and flags (which win) into the configuration classes and calls `function` with them.

    Options may be spelt with dashes or underscores, and a switch alone means true. An unknown key or a wrong type ends
    with exit code 2, and so does a `UsageError`; any other error of this package with 1.
    """
    from jsonargparse import ArgumentParser, set_parsing_settings

    logging.basicConfig(format="%(asctime)s %(message)s", stream=sys.stderr)
    logging.getLogger("eagle3_kimi").setLevel(logging.INFO)  # others only warn
    set_parsing_settings(docstring_parse_attribute_docstrings=True)  # --help shows the fields' docstrings
    parser = ArgumentParser(description=description, epilog=example and f"Example: {example}")
    parser.add_argument("--config", action="config", help="YAML file of the options below")
    classes = config_classes if isinstance(config_classes, tuple) else (config_classes,)
    for config_class in classes:
        parser.add_class_arguments(config_class)
    switches = {f"--{item.name}" for kind in classes for item in fields(kind) if item.type == "bool"}
    options = parser.parse_args(_spell_out([_spell(arg) for arg in (sys.argv[1:] if args is None else args)], switches))
    values = options.as_dict()
    before = signal.signal(signal.SIGTERM, _stop)  # the launcher's word to the others when one process has died
    try:
        function(*(kind(**{item.name: values[item.name] for item in fields(kind)}) for kind in classes))
    except Eagle3KimiError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        raise SystemExit(error.exit_code) from error
    finally:
        signal.signal(signal.SIGTERM, before)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise RunStopped(
        "the launcher told this process to end: another process of the run has died, or "
        "the run was cancelled. What is written stays; the same command goes on from there"
    )


def _spell_out(args: list[str], switches: set[str]) -> list[str]:
    """`--online --top_k 8` -> `--online=true --top_k 8`."""
    following = [*args[1:], "--"]
    return [
        f"{arg}=true" if arg in switches and after.startswith("--") else arg
        for arg, after in zip(args, following, strict=True)
    ]


def _spell(arg: str) -> str:
    """`--max-length=4096` -> `--max_length=4096`; `-o` -> `--output`."""
    if arg == "-o":
        return "--output"
    if not arg.startswith("--"):
        return arg
    name, equals, value = arg[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
