"""Holds the active StageController of a node: one run at a time, provisioning only as authority allows.

Refuses what does not match (another run active, an impossible range) with a StageFault that says why, and
performs the controller's `OpenModel` with the loader plug-in in a thread. Knows no transport: messages for
the orchestrator leave through `to_orchestrator`. Authority (spec sections 4 and 39) is kept here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from swactor_core.actors import ActorSystem, MachineActor
from swactor_core.agreement import agreement, bounds_fault, shared_of
from swactor_core.errors import ModelError, SwactorError
from swactor_core.events import EventName
from swactor_core.faults import Component, Fault, FaultReason, ModelFailure
from swactor_core.fsm import Effect, Send
from swactor_core.ids import NodeId, node_hex
from swactor_core.machines.provisioning import impossible, stage_config
from swactor_core.machines.stage import StageController, StageState
from swactor_core.machines.stage_effects import ModelFetch, ModelOpened, ModelRefused, OpenModel
from swactor_core.messages import Address, ProvisionStage, StageFault, StageStopped, StopRun
from swactor_core.node.data_plane import DataPlane
from swactor_core.node.model_files import FileFacts, explain_lost_page, facts_of
from swactor_core.observe.bus import EventBus
from swactor_core.schemas import Form
from swactor_core.spi.loader import Loader
from swactor_core.spi.worker import StageConfig

STAGE = Address(Component.STAGE_CONTROLLER)
TEARDOWN_BOUND = 10.0

_STAGE_CONFIG = Form(StageConfig, closed=False)


class _NoLongerWanted(Exception):
    """The run ended while its model was being fetched."""


class StageHost:
    def __init__(
        self,
        system: ActorSystem,
        bus: EventBus,
        *,
        node_id: NodeId,
        data_plane: DataPlane,
        loader: Loader,
        to_orchestrator: Callable[[object], None],
        on_stopped: Callable[[], None],
    ) -> None:
        self._system = system
        self._bus = bus
        self._node_id = node_id
        self._data_plane = data_plane
        self._loader = loader
        self._to_orchestrator = to_orchestrator
        self._on_stopped = on_stopped
        self.controller: StageController | None = None
        # The latest, known here from its arrival on: the controller takes it in its own turn.
        self._provision: ProvisionStage | None = None
        self._files: tuple[FileFacts, ...] = ()
        self.refused = 0

    def identities(self) -> dict[str, Any]:
        """Of the active run, for events of this node's edges and stage."""
        plan = self._provision
        return {} if plan is None else {"run_id": plan.run_id, "stage_index": plan.stage_index}

    def lost_page(self) -> tuple[str, str]:
        """Why a page of the model's files could not be read, as `explain_lost_page` says it."""
        return explain_lost_page(self._files)

    @property
    def active(self) -> bool:
        return self.controller is not None and self.controller.state is not StageState.STOPPED

    def provision(self, message: ProvisionStage) -> None:
        """Starts a stage, or answers StageFault when this node cannot take it (spec section 12)."""
        why = self._why_not(message)
        if why:
            self.refused += 1
            fault = Fault(
                FaultReason.PROVISIONING_REJECTED,
                Component.NODE,
                why,
                node_id=self._node_id,
                stage_index=message.stage_index,
            )
            self._bus.emit(EventName.PROVISIONING_REFUSED, {"run_id": message.run_id, "detail": why})
            self._to_orchestrator(StageFault(message.run_id, message.stage_index, fault))
            # Nothing of it is here: its run need not wait for an end that nobody else would tell.
            self._to_orchestrator(StageStopped(message.run_id, message.stage_index))
            return
        self._forget_last()
        self._provision, self._files = message, ()
        self.controller = StageController(teardown_bound=TEARDOWN_BOUND)
        actor = MachineActor(
            self._system,
            STAGE,
            machine=self.controller,
            bus=self._bus,
            perform=self._perform,
            route=self._route,
            defaults={"run_id": message.run_id, "stage_index": message.stage_index},
        )
        self._system.spawn(STAGE, actor)
        self._system.tell(STAGE, message)

    def _why_not(self, message: ProvisionStage) -> str:
        plan = self._provision
        if self.active and plan is not None:
            return f"run {plan.run_id} is active here as stage {plan.stage_index}"
        return impossible(message) or bounds_fault(message)

    def _forget_last(self) -> None:
        plan = self._provision
        if plan is not None:
            self._data_plane.forget((plan.inbound.edge_id, plan.outbound.edge_id))
            self._system.stop(STAGE)

    def stop_run(self, message: StopRun) -> None:
        """StopRun for the active run; for any other run there is nothing here to stop."""
        if self.active and self._provision is not None and self._provision.run_id == message.run_id:
            self._system.tell(STAGE, message)

    def abandon(self) -> None:
        """The orchestrator is gone: stop the run locally, so that every lease is given back."""
        if self.active and self._provision is not None:
            self._system.tell(STAGE, StopRun(self._provision.run_id))

    def _route(self, action: Send) -> bool:
        if action.to.component is not Component.RUN:
            return self._data_plane.establisher.to_gate(action)
        self._to_orchestrator(action.message)
        if isinstance(action.message, StageStopped):
            self._on_stopped()
        return True

    def _perform(self, effect: Effect) -> None:
        assert isinstance(effect, OpenModel)
        self._system.start_task(self._open_model(effect.provision), owner=STAGE)

    async def _open_model(self, provision: ProvisionStage) -> None:
        loop, ended = asyncio.get_running_loop(), threading.Event()

        def tell(message: ModelFetch | ModelOpened | ModelRefused) -> None:
            # A slow open may outlive its run: what it finds does not concern the next one.
            if self._provision is provision:
                self._system.tell(STAGE, message)

        def progress(done: int, total: int) -> None:
            if ended.is_set() or not self._prepares(provision):
                raise _NoLongerWanted
            loop.call_soon_threadsafe(tell, ModelFetch(done, total))

        try:
            config, files = await asyncio.to_thread(self._stage_config, provision, progress)
        except _NoLongerWanted:
            return
        except SwactorError as error:
            cause = error.cause if isinstance(error, ModelError) else ModelFailure.REFUSED
            tell(ModelRefused(error.line, cause))
        else:
            if self._provision is provision:
                self._files = files
            tell(ModelOpened(config))
        finally:
            ended.set()

    def _prepares(self, provision: ProvisionStage) -> bool:
        """Asked in the thread that fetches: whether anybody still waits for what it brings."""
        controller = self.controller
        return (
            controller is not None
            and controller.state is StageState.PREPARING
            and self._provision is provision
        )

    def _stage_config(
        self, provision: ProvisionStage, progress: Callable[[int, int], None]
    ) -> tuple[dict[str, Any], tuple[FileFacts, ...]]:
        source = provision.gguf_source
        layers = provision.layer_start, provision.layer_end_exclusive
        name = self._loader.resolve(source.uri, progress)
        told = {"outline": source.outline} if source.outline else {}
        model = self._loader.open(name, progress, **told)
        try:
            digest = model.digest()
            if source.digest and digest != source.digest:
                raise ModelError(
                    f"{source.shown!r} on node {node_hex(self._node_id)} is another file: its digest is "
                    f"{digest}, the plan was made for {source.digest}",
                    hint="put the same file on every node",
                    cause=ModelFailure.DIFFERENT_FILE,
                )
            mine = agreement(digest, shared_of(provision))
            if source.digest and provision.agreement and mine != provision.agreement:
                raise ModelError(
                    f"node {node_hex(self._node_id)} understands this run's plan as {mine}, the orchestrator "
                    f"as {provision.agreement}",
                    hint="run the same version of swactor on every node",
                    cause=ModelFailure.PLAN_DIFFERS,
                )
            manifest = model.manifest(*layers)
            model.fetch(*layers, progress=progress)
            files = facts_of(tensor.path for tensor in manifest.tensors)
            config = stage_config(provision, manifest)
        finally:
            model.close()
        dumped: dict[str, Any] = _STAGE_CONFIG.serializer.to_python(config, mode="json")
        return dumped, files
