"""The path under which version 0.1.0 documented the protocol of trackers."""

from threefold.jsonl import Tracker as Tracker
