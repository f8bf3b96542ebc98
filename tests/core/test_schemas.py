"""The schemas that messages are validated by are those that pydantic makes of the same classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import ConfigDict, TypeAdapter, with_config
from swactor_core.messages import CONTROL_MESSAGES, WORKER_COMMANDS, WORKER_EVENTS
from swactor_core.schemas import Form, schema_of
from swactor_core.spi.worker import StageConfig

MESSAGES = sorted({*CONTROL_MESSAGES, *WORKER_COMMANDS, *WORKER_EVENTS}, key=lambda kind: kind.__name__)
# what pydantic writes out although it means the same without
SAID_WITHOUT_NEED = {
    "frozen": False,
    "post_init": False,
    "collect_init_only": False,
    "computed_fields": [],
    "init": True,
    "kw_only": False,
    "default_factory_takes_data": False,
}


def bare(schema: Any, definitions: dict[str, Any]) -> Any:
    """Without references, what pydantic keeps for JSON schemas, and what goes without saying."""
    if isinstance(schema, list):
        return [bare(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "definitions":
        known = {each["ref"]: each for each in schema["definitions"]}
        return bare(schema["schema"], {**definitions, **known})
    if schema.get("type") == "definition-ref":
        return bare(definitions[schema["schema_ref"]], definitions)
    return {
        name: bare(value, definitions)
        for name, value in schema.items()
        if name not in ("ref", "metadata", "serialization") and SAID_WITHOUT_NEED.get(name) != value
    }


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_s_schema_is_pydantic_s(kind: type[Any]) -> None:
    theirs = TypeAdapter(with_config(ConfigDict(extra="forbid"))(kind)).core_schema
    assert bare(schema_of(kind, closed=True), {}) == bare(theirs, {})


def test_a_stage_s_schema_is_pydantic_s() -> None:
    assert bare(schema_of(StageConfig, closed=False), {}) == bare(TypeAdapter(StageConfig).core_schema, {})


def test_what_no_border_has_is_refused() -> None:
    @dataclass
    class Foreign:
        what: set[int]

    with pytest.raises(TypeError, match=r"set\[int\] crosses no border"):
        Form(Foreign, closed=True).validator.validate_python({})
