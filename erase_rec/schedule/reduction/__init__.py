"""Where the gradients of dense parameters live, and how they become the mean over the ranks."""
