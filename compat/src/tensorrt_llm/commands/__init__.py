"""The programs that TensorRT-LLM installs, and its scripts that convert and quantize."""
