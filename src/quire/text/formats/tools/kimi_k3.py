"""Kimi K3: typed arguments between paired markers."""

from quire.text.formats.shapes import ParameterCall, ToolFormat, TypeMark

FORMAT = ToolFormat(
    "kimi_k3",
    (
        ParameterCall(
            name_end='" index="',
            number_end='"<|sep|>',
            key_begin='<|open|>argument key="',
            key_end=('"',),
            types=(
                TypeMark(' type="string"<|sep|>', "string", raw=True),
                TypeMark(' type="number"<|sep|>', "number", raw=False),
                TypeMark(' type="number"<|sep|>', "integer", raw=False),
                TypeMark(' type="boolean"<|sep|>', "boolean", raw=False),
                TypeMark(' type="null"<|sep|>', "null", raw=False),
                TypeMark(' type="array"<|sep|>', "array", raw=False),
                TypeMark(' type="object"<|sep|>', raw=False),
            ),
            value_end="<|close|>argument<|sep|>",
            after="<|close|>call<|sep|>",
            gap="",
        ),
    ),
    begin=('<|open|>call tool="',),
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
)
