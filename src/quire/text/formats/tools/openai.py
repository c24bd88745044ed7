"""gpt-oss: calls are messages with a recipient (harmony)."""

from quire.text.formats.shapes import Channels, ToolFormat

FORMAT = ToolFormat("openai", (), channels=Channels())
