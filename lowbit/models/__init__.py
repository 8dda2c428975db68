"""Transformers models: loading, quantizing and converting them.

Transformers is imported first: its import triggers that of `hf.py` (lowbit/__init__.py), which must not find another module of
this package half imported.
"""

import transformers.modeling_utils  # noqa: F401
