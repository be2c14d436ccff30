"""kdtree_engine: DDTree speculative decoding for DeepSeek-V3-style models, bit for bit the output of plain
decoding. ::

    from kdtree_engine import Engine

    engine = Engine.load("path/to/model")
    for event in engine.session().generate("Once upon a time"):
        print(event.text, end="", flush=True)
"""

try:
    from ._native import CombinedDrafter, DFlashDrafter, NgramDrafter, PlantedDrafter, ReplayDrafter, build_info
except ImportError as error:
    from ._absent import sentence

    raise ImportError(sentence(error)) from error
from .demo import DemoModel, demo_model
from .draft_config import DraftOptions
from .engine import Engine
from .errors import EngineError
from .sampling import Sampling, TokenLogprobs
from .session import Event, Generation, GenerationResult, Session

__version__: str = build_info()["version"]

__all__ = [
    "CombinedDrafter",
    "DFlashDrafter",
    "DemoModel",
    "DraftOptions",
    "Engine",
    "EngineError",
    "Event",
    "Generation",
    "GenerationResult",
    "NgramDrafter",
    "PlantedDrafter",
    "ReplayDrafter",
    "Sampling",
    "Session",
    "TokenLogprobs",
    "__version__",
    "demo_model",
]
