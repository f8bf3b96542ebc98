"""The last stage's sampler: the core's, whose refusals are a step's failure here.

Must not know devices or models.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from swactor_core import sampling
from swactor_core.errors import UndecidableLogits
from swactor_core.faults import StepFailure
from swactor_core.spi.worker import StepError


class Sampler(sampling.Sampler):
    def pick(self, logits: bytes | memoryview | NDArray[np.float32]) -> int:
        """As the core's. Raises StepError."""
        try:
            return super().pick(logits)
        except UndecidableLogits as error:
            raise StepError(StepFailure.TINYGRAD_ERROR, error.message) from error
