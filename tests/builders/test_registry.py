from __future__ import annotations

import re
from pathlib import Path

from eagle3_kimi.builders.registry import _ROW_DECIDING_MODULES

import eagle3_kimi


def test_what_the_protocol_is_made_of_decides_rows() -> None:
    source = (Path(eagle3_kimi.__file__).parent / "protocol.py").read_text()
    imported = set(re.findall(r"^from eagle3_kimi\.(\w+) import", source, re.MULTILINE)) - {"errors"}
    assert imported >= {"markers"}
    assert {f"{name}.py" for name in imported} <= set(_ROW_DECIDING_MODULES)
