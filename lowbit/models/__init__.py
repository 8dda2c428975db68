"""Models of Transformers, which is imported before anything here: it calls for `hf.py` when it is (lowbit/__init__.py), and
that must not find another module of this package half imported."""

import transformers.modeling_utils  # noqa: F401
