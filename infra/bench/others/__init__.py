"""What one has before a pipeline like this: the same model behind other ways to batch, or none."""
