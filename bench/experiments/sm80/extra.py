MODULES = {k: MODULES[k] for k in ("base", "new", "c32a2", "c128a1")}
