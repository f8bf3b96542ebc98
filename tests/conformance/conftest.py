"""Makes `wrong_kit.py` and the tests' servers importable, here and in runs that the kit's own tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
