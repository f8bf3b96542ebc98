"""Makes `wrong_kit.py` importable, here and in the runs that the kit's own tests start."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
