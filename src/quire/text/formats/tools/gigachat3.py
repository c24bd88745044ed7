"""GigaChat 3: a message of the role `function call`."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "gigachat3",
    (JsonCall(),),
    begin=(
        "function call<|role_sep|>\n",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "<|function_call|>",
    ),
    end="<|message_sep|>",
)
