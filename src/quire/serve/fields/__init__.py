"""What every endpoint does with each field of its body: data that the parser, the docs and the tests read."""
