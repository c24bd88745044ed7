"""Prompts."""

from quire.llm.prompts import Prompt as PromptType
from quire.llm.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
