"""What to train with: ways to run one model's step, measured in turns, and what the measurements recommend."""
