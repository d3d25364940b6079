"""Encore's inference engine, usable without Hydra or Weights & Biases.

    from engine import Engine, EngineConfig, ModelConfig, SamplingParams

    with Engine(EngineConfig(model=ModelConfig(path="path/to/model"))) as engine:
        print(engine.generate(["The capital of France is"], SamplingParams(max_tokens=16))[0].text)

Names are resolved on first use, so that reading the configuration schema does not import torch.
"""

import importlib
from typing import Any

_HOME = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "GraphConfig": "engine.config",
    "KernelsConfig": "engine.config",
    "KVConfig": "engine.config",
    "ModelConfig": "engine.config",
    "RequestOutput": "engine.request",
    "SamplerConfig": "engine.config",
    "SamplingParams": "engine.request",
    "SchedulerConfig": "engine.config",
    "TokenEvent": "engine.request",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
