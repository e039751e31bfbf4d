"""The contribution: the order of a training step's work on streams, and the proof that it is right."""
