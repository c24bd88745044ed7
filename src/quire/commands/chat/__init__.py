"""`quire chat`: a conversation in the terminal, with a model in this process or on a running server."""

from quire.commands.chat.command import COMMAND

__all__ = ["COMMAND"]
