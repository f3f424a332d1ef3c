"""The libraries that people would use instead, behind the engine protocol, set up as their documentation recommends."""

from zerotune.peers.base import Peer, PeerSetup
from zerotune.peers.build import PEERS, build_peer

__all__ = ["PEERS", "Peer", "PeerSetup", "build_peer"]
