"""Comparisons with other libraries; each is skipped where its library is missing."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")  # before TensorFlow or Keras is imported
