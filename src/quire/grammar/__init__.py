"""From a request's constraint to the tokens that may come next, using llguidance. Knows no model and no text files."""
