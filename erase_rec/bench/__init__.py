"""Measuring training steps: arms that take turns, device work by stream, and the floor under each step."""
