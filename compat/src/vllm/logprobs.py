"""Log-probabilities of tokens."""

from quire.client.logprobs import FlatLogprobs, Logprob

__all__ = ["FlatLogprobs", "Logprob"]
