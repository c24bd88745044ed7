"""Makes quantized checkpoints: runs a model layer by layer over a text, and rounds weights by what they multiply."""
