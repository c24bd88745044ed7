"""Command R and R+: a JSON list in a code block."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "cohere_command_r",
    (JsonCall(key="parameters", name_key="tool_name", listed=True),),
    begin=("Action: ```json\n", "Action:```json\n", "Action:\n```json\n"),
    end="```",
)
