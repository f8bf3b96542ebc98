"""Writes docs/machines.md from the transition tables. Run after a table has changed."""

from __future__ import annotations

from pathlib import Path

from swactor_core.diagram import page

if __name__ == "__main__":
    target = Path(__file__).resolve().parents[1] / "docs" / "machines.md"
    target.write_text(page(), encoding="utf-8")
