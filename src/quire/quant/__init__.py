"""Weights in few bits: the schemes that users name. The layouts themselves are the backends' own."""
