"""Typed access to the metadata keys of one architecture, and the refusal of those that nobody asked for.

Knows GGUF key names and which of them mean nothing here. Must not know what a key's value is used for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from swactor_core.faults import RoleFailure
from swactor_core.spi.loader import Scalar
from swactor_core.spi.worker import RoleError

Value = Scalar | tuple[Scalar, ...]

# Keys that change nothing in this computation, whatever they say.
_HARMLESS = frozenset(
    {
        "context_length",
        "vocab_size",
        "tensor_data_layout",
        "rope.scaling.original_context_length",
        "rope.scaling.finetuned",
        "attention.layer_norm_epsilon",
        "expert_feed_forward_length",
    }
)
# Keys of features that are not implemented, and the values that ask for nothing.
_OFF: Mapping[str, tuple[Scalar, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "attention.causal": (True,),
    "attention.shared_kv_layers": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attention.temperature_scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "pooling_type": (0,),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "use_parallel_residual": (False,),
}


def invalid(message: str, hint: str = "") -> RoleError:
    return RoleError(RoleFailure.CONFIG_INVALID, message, hint=hint)


def unsupported(message: str, hint: str = "use a model without it") -> RoleError:
    return RoleError(RoleFailure.UNSUPPORTED_ARCHITECTURE, message, hint=hint)


class ModelKeys:
    """`{architecture}.*`; remembers what was asked for, so that the rest can be refused. Every reading method
    raises RoleError naming the key when it is missing without a default, or of another type."""

    def __init__(self, architecture: str, metadata: Mapping[str, Value]) -> None:
        self.prefix = architecture + "."
        self._values = {
            name[len(self.prefix) :]: value
            for name, value in metadata.items()
            if name.startswith(self.prefix)
        }
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def raw(self, name: str) -> Value | None:
        self._used.add(name)
        return self._values.get(name)

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            kind = "a positive whole number" if least == 1 else f"a whole number from {least} on"
            raise invalid(f"metadata key {self.prefix}{name} = {value!r} is not {kind}")
        return value

    def real(self, name: str, default: float | None = None) -> float:
        value = self._one(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise invalid(f"metadata key {self.prefix}{name} = {value!r} is not a finite number")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._one(name, default)
        if not isinstance(value, str):
            raise invalid(f"metadata key {self.prefix}{name} = {value!r} is not a string")
        return value

    def _one(self, name: str, default: Scalar | None) -> Scalar:
        """A scalar, or the one value that a per-layer array repeats; arrays that vary are not implemented."""
        self._used.add(name)
        value = self._values.get(name, default)
        if value is None:
            raise invalid(f"the model file lacks the metadata key {self.prefix}{name}")
        if isinstance(value, tuple):
            layers = self._values.get("block_count")
            if len(value) != layers:
                raise invalid(
                    f"metadata key {self.prefix}{name} has {len(value)} elements for {layers} layers"
                )
            if any(item != value[0] for item in value):
                raise invalid(
                    f"metadata key {self.prefix}{name} differs between layers, which is not supported"
                )
            return value[0]
        return value

    def refuse_the_rest(self) -> None:
        """Raises RoleError for the first key that was not read, is not harmless and does not say `off`."""
        for name in sorted(self._values.keys() - self._used - _HARMLESS):
            value = self._values[name]
            # Python's True is 1: a flag that is a number says something else
            if any(
                value == off and isinstance(value, bool) == isinstance(off, bool)
                for off in _OFF.get(name, ())
            ):
                continue
            raise unsupported(
                f"metadata key {self.prefix}{name} = {value!r} asks for what this worker does not implement"
            )
