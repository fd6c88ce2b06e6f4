"""Encoders of images, a file for each projector: it turns metadata into a `Tower`, of the parts of `builder.py`."""
