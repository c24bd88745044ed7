"""Turns a request's constraint into the tokens that may come next, by llguidance. Knows no model and no text files."""
