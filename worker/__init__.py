"""The line itself: messages, micro-batches, images, the model and its verdicts."""
