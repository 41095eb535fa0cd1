"""Training: its settings, one step of it, and what makes it continue to the same bits."""
