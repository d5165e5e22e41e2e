"""A seeded fuzzer of the public API: random calls with valid and invalid arguments, on every network of `cases`.

Public functions, classes and methods are found by looking (`calls`), so that new ones join by themselves; what their
arguments may be is read off names and annotations (`values`). A run is a row of sequences; sequence `i` of a seed is
always the same: one call, then up to three on what it returned. `watch` judges each call.

`python -m fuzz --calls 20000` runs it in two processes; `--only i` repeats a single sequence with its traceback.
"""
