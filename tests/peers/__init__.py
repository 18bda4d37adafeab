"""Comparisons with other libraries; each is skipped where the library is not installed."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before TensorFlow or Keras is imported
