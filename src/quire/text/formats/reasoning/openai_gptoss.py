"""gpt-oss: the channel `analysis` (harmony)."""

from quire.text.formats.shapes import Channels, ReasoningFormat

FORMAT = ReasoningFormat("openai_gptoss", channels=Channels())
