"""From options to a proposer."""

from __future__ import annotations

from quire.config import SpeculativeOptions
from quire.spec_decode.lookup import NgramProposer
from quire.spec_decode.proposer import Proposer
from quire.spec_decode.suffix import SuffixProposer

LOOKUP_TOKENS = 5


def make_proposer(options: SpeculativeOptions | None) -> tuple[Proposer | None, int]:
    """The proposer, and the most tokens that it drafts for a sequence in one step."""
    if options is None:
        return None, 0
    wanted = options.num_speculative_tokens
    if options.method == "ngram":
        return NgramProposer(*options.lookup_range), wanted or LOOKUP_TOKENS
    if options.method == "suffix":
        return SuffixProposer(options), wanted or options.suffix_decoding_max_tree_depth
    raise NotImplementedError
