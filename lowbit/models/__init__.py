"""Transformers models: loading, quantizing and converting them.

Transformers is imported first. Its import triggers the import of `hf.py` (lowbit/__init__.py), and at that time no other module
of this package may be partially imported.
"""

import transformers.modeling_utils  # noqa: F401
