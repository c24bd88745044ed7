"""From a request's constraint to the tokens that may come next, over llguidance. Knows no model and no text files."""
