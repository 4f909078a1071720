"""These tests need what `make test-plugins` installs in a folder of its own."""

from importlib.util import find_spec

import hydra_plugins  # a namespace, which holds our own as well

PLUGINS = ("hydra_joblib_launcher", "hydra_optuna_sweeper")
missing = [name for name in PLUGINS if find_spec(f"{hydra_plugins.__name__}.{name}") is None]
collect_ignore = ["test_plugins.py"] if missing else []
