"""Which operation, in which line, made a result NaN or infinite.

internals: what is taken from JAX beyond its public names.
primitives: what is known of operations.
watch: a program that does what the call does, and writes numbers.
events: what is known of arrays, and of where bad values began.
walk: reads these numbers, and finds where each bad value began.
lines: the user's line of an operation, and its pass.
accused: which beginnings are causes.
causes: a cause, and its text.
explain: the public function.
"""
