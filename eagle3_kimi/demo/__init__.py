"""The whole pipeline on the tiny Kimi target, through the entry points a person would use."""

from __future__ import annotations

from eagle3_kimi.demo.run import run_demo
from eagle3_kimi.demo.settings import DemoSettings
from eagle3_kimi.demo.summary import render_table

__all__ = ["DemoSettings", "render_table", "run_demo"]
