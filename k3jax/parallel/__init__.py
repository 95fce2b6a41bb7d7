"""What runs across a mesh: local shards, expert transports. Knows no model."""
