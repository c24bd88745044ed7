"""Tables of the fields of bodies: data that the parser, the docs and the tests read."""
