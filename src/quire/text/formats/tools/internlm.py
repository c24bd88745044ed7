"""InternLM 2.5 and 3: a JSON object between markers."""

from quire.text.formats.shapes import JsonCall, ToolFormat

FORMAT = ToolFormat(
    "internlm",
    (JsonCall(key="parameters"),),
    begin=("<|action_start|><|plugin|>",),
    end="<|action_end|>",
    pad="\n",
)
