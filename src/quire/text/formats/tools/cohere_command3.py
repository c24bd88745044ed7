"""Command R7B and Command A: a JSON list between markers."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "cohere_command3",
    (JsonCall(key="parameters", name_key="tool_name", id_key="tool_call_id", listed=True),),
    begin=("<|START_ACTION|>",),
    end="<|END_ACTION|>",
)
