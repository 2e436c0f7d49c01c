"""Store, publish and count what was measured."""
