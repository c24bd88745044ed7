"""The parts of a decoder, each one class: its config, the weights that it asks for by path, and its operations."""
