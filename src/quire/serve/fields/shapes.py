"""Describe the fields of a body: taken, ignored and why, refused and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import msgspec

Body = TypeVar("Body", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer and is not implemented.

    A value that asks for nothing is ignored: one of `neutral`, an empty text and, unless `off` or `empty` say
    otherwise, false and an empty list or object.
    """

    why: str
    neutral: tuple[Any, ...] = ()
    empty: bool = True
    off: bool = True

    def asks(self, value: Any) -> bool:
        """Tell whether the value asks for something."""
        if value is None or value == "" or (value is False and self.off):
            return False
        if self.empty and value in ([], {}):
            return False
        return not any(type(value) is type(known) and value == known for known in self.neutral)


@dataclass(frozen=True, slots=True)
class Shape:
    """The fields of one object: taken with its meaning, or ignored or refused with the reason.

    `inner` describes taken fields that are objects or lists of objects. With `template`, names that the chat template
    reads are taken too. With `nulls`, null is a value; elsewhere a null field is absent. With `kinds`, an object of
    another `type` is taken as it is.
    """

    taken: Mapping[str, str]
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    inner: Mapping[str, Shape] = field(default_factory=dict)
    template: bool = False
    nulls: bool = False
    kinds: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """List all known names."""
        return (*self.taken, *self.ignored, *self.refused)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields(Shape, Generic[Body]):
    """The fields of the body that `path` takes, which becomes a `body`; by default the struct's own.

    What is taken is not ignored, and what is ignored is not refused, so that tables of other servers' fields fit all.
    """

    taken: Mapping[str, str] = field(default_factory=dict)
    path: str
    body: type[Body]

    def __post_init__(self) -> None:
        if not self.taken:
            object.__setattr__(self, "taken", dict.fromkeys(self.body.__struct_fields__, ""))
        ignored = {name: why for name, why in self.ignored.items() if name not in self.taken}
        refused = {n: rule for n, rule in self.refused.items() if n not in self.taken and n not in ignored}
        object.__setattr__(self, "ignored", ignored)
        object.__setattr__(self, "refused", refused)


def names(text: str) -> dict[str, str]:
    """Take fields of an inner object, whose names say what they mean."""
    return dict.fromkeys(text.split(), "")


FUNCTION = Shape(
    names("name description parameters strict"), ignored={"defer_loading": "tools are always shown"}
)
TOOLS = Shape(
    names("type function custom"),
    ignored={"defer_loading": "tools are always shown"},
    inner={"function": FUNCTION, "custom": Shape(names("name description format"))},
)
JSON_SCHEMA = Shape(
    names("schema"),
    ignored=dict.fromkeys(("name", "description", "strict"), "the answer always matches the schema"),
)
RESPONSE_FORMAT = Shape(
    names("type schema json_schema format structures triggers"), inner={"json_schema": JSON_SCHEMA}
)
STREAM_OPTIONS = Shape(
    names("include_usage continuous_usage_stats"), ignored={"include_obfuscation": "nothing is padded"}
)
STRUCTURED = Shape(
    names(
        "json regex choice grammar json_object structural_tag disable_any_whitespace disable_additional_properties "
        "whitespace_pattern select"
    ),
    ignored=dict.fromkeys(("_backend", "_backend_was_auto", "disable_fallback"), "there is one backend"),
)
REPETITION = Shape(names("max_pattern_size min_pattern_size min_count"))

CONTENT = Shape(
    names("type text refusal cache_control"),
    ignored={"annotations": "they are no text", "logprobs": "they are no text"},
    refused=dict.fromkeys(
        ("image_url", "image", "input_audio", "audio_url", "video_url", "file"), Refused("content is text")
    ),
    template=True,
    nulls=True,
)
CALL = Shape(
    names("id type function custom"),
    ignored={"index": "calls are in order", "extra_content": "other servers' own data"},
    inner={"function": Shape(names("name arguments"), nulls=True, template=True)},
    nulls=True,
    template=True,
)
MESSAGES = Shape(
    names(
        "role content name tool_calls tool_call_id reasoning reasoning_content thinking refusal cache_control"
    ),
    ignored=dict.fromkeys(
        ("annotations", "id", "reasoning_details", "provider_specific_fields"),
        "the chat template does not read it",
    ),
    refused={
        "function_call": Refused("use tool_calls"),
        "audio": Refused("content is text"),
        "prefix": Refused("use continue_final_message"),
    },
    inner={"content": CONTENT, "tool_calls": CALL},
    template=True,
    nulls=True,
)
INNER = {
    "stream_options": STREAM_OPTIONS,
    "response_format": RESPONSE_FORMAT,
    "structured_outputs": STRUCTURED,
    "repetition_detection": REPETITION,
    "prediction": Shape(names("type content"), inner={"content": Shape(names("type text"))}),
}
