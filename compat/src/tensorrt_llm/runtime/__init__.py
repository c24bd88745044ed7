"""Runs engines on batches of token ids."""

from tensorrt_llm.runtime.generation import GenerationSession, ModelConfig
from tensorrt_llm.runtime.runner import ModelRunner, ModelRunnerCpp
from tensorrt_llm.runtime.sampling import SamplingConfig

__all__ = ["GenerationSession", "ModelConfig", "ModelRunner", "ModelRunnerCpp", "SamplingConfig"]
