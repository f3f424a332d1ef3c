"""The libraries that people would use instead, behind the engine protocol, set up as their documentation recommends."""

from zerotune.peers.base import Peer, PeerSetup
from zerotune.peers.build import build_peer

__all__ = ["Peer", "PeerSetup", "build_peer"]
