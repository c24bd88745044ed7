"""Speculative decoding: proposers of drafts, and how much to draft. Knows models; knows no scheduler.

A step computes a draft together with a sequence's last token. A draft's token is accepted if it equals the token that
the target draws there, so drafts change how many steps an output takes and nothing else.
"""
