"""Ways to a device; what only a GPU shows is in tests/gpu/test_graph.py."""

import torch

from gapless.data.transfer import Transfer


def test_every_way_to_a_device_is_one_stream(monkeypatch):
    """Each evaluation opens a way: on streams of their own its batches would find none of the memory there is."""
    made = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or object())
    devices = [torch.device("cuda", index) for index in (100, 101)]  # which no other test has
    ways = [Transfer(device) for device in (*devices, *devices)]
    assert made == devices
    assert ways[0]._stream is ways[2]._stream is not ways[1]._stream
