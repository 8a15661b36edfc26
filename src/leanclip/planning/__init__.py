"""What a step needs before it is run: memory by tracing, time by a roofline, communication by a network model."""

from leanclip.planning.gpu_model import CARDS, Card, calibrated, card_named
from leanclip.planning.network import NETWORKS, Network
from leanclip.planning.step_trace import Kernel, Trace, tracing

__all__ = ["CARDS", "NETWORKS", "Card", "Kernel", "Network", "Trace", "calibrated", "card_named", "tracing"]
