"""A small OFA, trained here on drawn catalog scenes, so that the demo runs the real loading and scoring code."""
