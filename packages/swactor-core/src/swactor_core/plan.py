"""The run plan (spec section 11): which stage runs which layers on which node, over which edges.

Pure data, validated where it is built (`planner.py`) and again where it is received. Model hyper-parameters
and tensor positions are the loader's (`spi/loader.py`); the plan carries only what stages must agree on.
"""

from __future__ import annotations

import re
from dataclasses import field, replace
from enum import StrEnum

from swactor_core.ids import EdgeId, NodeId, RunId, StageIndex
from swactor_core.specs import DTypeFamily, ObjectSpec, RingDirection, RingSpec
from swactor_core.values import frozen


@frozen
class GgufSource:
    """Where the GGUF bytes are. `uri` is a path or another name that the loader resolves on each node;
    `digest` is of header, tensor table and size, so that stages cannot load different files; `outline` is
    what `Model.outline` says. An address may carry a signature that grants access: people and logs are given
    `shown`."""

    uri: str = field(repr=False)
    digest: str = ""
    outline: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The uri without query, fragment and credentials where it is an address."""
        if "://" not in self.uri:
            return self.uri
        return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", self.uri, maxsplit=1)[0])


# A bias from here down bans its token, as -inf would, which does not travel as JSON.
BAN = -1e9


@frozen
class SamplingPolicy:
    """How a row of logits becomes a token; `sampling.py` says in which order.

    Temperature 0 is greedy, ties to the lowest id; otherwise softmax sampling from `seed`. The penalties see
    the last `repeat_last_n` tokens of prompt and answer, 0 none and -1 all; `history` is the part of the
    prompt that they see (`after`). `logit_bias` holds (token id, what is added to its logit); `BAN`
    and less leave the token no chance whatever the rest of the policy says."""

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repeat_last_n: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    history: tuple[int, ...] = ()

    @property
    def penalises(self) -> bool:
        """Whether what came before has any weight."""
        strengths = (self.repeat_penalty - 1.0, self.frequency_penalty, self.presence_penalty)
        return self.repeat_last_n != 0 and any(strengths)

    def after(self, prompt: tuple[int, ...]) -> SamplingPolicy:
        """The policy of a run with that prompt: whoever samples need not know the prompt otherwise."""
        start = max(len(prompt) - self.repeat_last_n, 0) if self.repeat_last_n >= 0 else 0
        return replace(self, history=prompt[start:] if self.penalises else ())


class TokenOutputPolicy(StrEnum):
    """What travels on the token-out edge (spec section 10): a sampled id, or one row of logits."""

    TOKEN_IDS = "TokenIds"
    LOGITS = "Logits"


@frozen
class GgufModelPlan:
    model_id: str
    gguf_source: GgufSource
    num_layers: int
    hidden_dim: int
    vocab_size: int
    dtype_family: DTypeFamily
    dtype_width_bytes: int
    max_seq_len: int
    end_of_generation: tuple[int, ...]


@frozen
class RuntimePlan:
    """`prompt` is token ids: the orchestrator tokenises (spec section 4). With `weights_in_memory` stages may
    hold their weights in memory of their own, outside of the model's file. It is one word for all of them:
    who lays weights out anew may add in another order, and every split is to give the same tokens."""

    prompt: tuple[int, ...]
    sampling: SamplingPolicy
    token_output_policy: TokenOutputPolicy
    weights_in_memory: bool = False


@frozen
class StagePlan:
    run_id: RunId
    stage_index: StageIndex
    stage_count: int
    node_id: NodeId
    gguf_source: GgufSource
    layer_start: int
    layer_end_exclusive: int
    inbound_edge: EdgeId
    outbound_edge: EdgeId


class EdgeKind(StrEnum):
    TOKEN_IN = "TokenIn"
    ACTIVATION = "Activation"
    TOKEN_OUT = "TokenOut"


@frozen
class EdgeEndpoint:
    """One end of an edge. `stage_index` is None for the orchestrator's end."""

    node_id: NodeId
    stage_index: StageIndex | None = None


@frozen
class EdgePlan:
    run_id: RunId
    edge_id: EdgeId
    kind: EdgeKind
    producer: EdgeEndpoint
    consumer: EdgeEndpoint
    object_spec: ObjectSpec
    ring_capacity: int

    def ring_spec(self, direction: RingDirection) -> RingSpec:
        """The ring at one end of this edge: `Egress` at the producer, `Ingress` at the consumer."""
        return RingSpec(self.ring_capacity, direction)


@frozen
class RunPlan:
    run_id: RunId
    model: GgufModelPlan
    runtime: RuntimePlan
    stages: tuple[StagePlan, ...]
    edges: tuple[EdgePlan, ...]
    max_tokens: int
