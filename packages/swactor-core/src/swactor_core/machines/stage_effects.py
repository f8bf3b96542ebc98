"""What passes between a stage and its adapter: how the model of its range is opened.

Data only. The other events of a stage are messages of the orchestrator, its edges and the worker.
"""

from __future__ import annotations

from typing import Any

from swactor_core.faults import ModelFailure
from swactor_core.fsm import Effect
from swactor_core.messages import ProvisionStage
from swactor_core.values import frozen


@frozen
class ModelFetch:
    """Adapter: the source is being resolved; `done` of `total` bytes are here."""

    done: int
    total: int


@frozen
class ModelOpened:
    """Adapter: artifact bytes are local, the range is validated; `config` is ConfigureRole's."""

    config: dict[str, Any]


@frozen
class ModelRefused:
    """Adapter: the artifact cannot be had, read, or does not hold the range."""

    detail: str
    cause: ModelFailure = ModelFailure.REFUSED


@frozen
class OpenModel(Effect):
    provision: ProvisionStage
