"""From token ids to streamed text: UTF-8-safe detokenisation and stop strings."""

from dspark.text.detokenize import Detokenizer
from dspark.text.stops import StopMatcher, TextStream

__all__ = ["Detokenizer", "StopMatcher", "TextStream"]
